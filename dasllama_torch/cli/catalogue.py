"""`list`: the models that have names."""

from .output import megabytes


def command() -> None:
    """Print the catalogue of models. It has names, sizes, licences, and the files of those that were pulled."""
    from dasllama_torch import hub

    for model in hub.CATALOGUE:
        where = model.path if hub.is_pulled(model) else "not pulled"
        print(f"{model.name:24}{megabytes(model.size):>10}  {model.licence:28}{where}")
