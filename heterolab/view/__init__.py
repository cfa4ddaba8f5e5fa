"""Pictures of a run: the timeline, charts, and the panel with the knobs.

Only this package knows plotly and ipywidgets. It shows traces and never makes them.
"""
