"""Tasks and data: what is trained, on which samples, in which order."""
