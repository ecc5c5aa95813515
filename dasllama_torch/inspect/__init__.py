"""Looking into a model, and comparing it with another."""
