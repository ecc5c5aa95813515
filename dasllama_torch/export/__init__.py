"""Out of the package: a model as transformers keeps it, and files of other types."""
