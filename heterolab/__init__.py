"""HeteroLab: see how a CPU and a GPU share the work of serving a model."""
