"""What happened: spans, traces, and the questions one can ask of them."""
