"""The notebooks run, as they stand in the repository: without outputs, which a run makes."""

import os

import pytest
from conftest import ROOT

NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))


@pytest.fixture(scope="module")
def client(tmp_path_factory):
    """A kernel for all of them, as torch and matplotlib take it seconds to import. It has one thread: of two, one would
    spin for the core that the tests beside it have."""
    import nbformat
    from nbclient import NotebookClient

    resources = {"metadata": {"path": str(tmp_path_factory.mktemp("notebooks"))}}
    client = NotebookClient(nbformat.v4.new_notebook(), timeout=600, resources=resources)
    with client.setup_kernel(env=os.environ | {"OMP_NUM_THREADS": "1"}):
        yield client


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs(path, demo_model, client):
    import nbformat

    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    for cell in notebook.cells:
        if "parameters" in cell.metadata.get("tags", ()):
            cell.source = f"path = {str(demo_model)!r}"
    forget = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell("%reset -f")])  # names of the one before
    for client.nb in (forget, notebook):
        client.reset_execution_trackers()
        for index, cell in enumerate(client.nb.cells):
            client.execute_cell(cell, index)
    outputs = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    assert sum("image/png" in output.get("data", {}) for output in outputs) >= 3
    assert not [output for output in outputs if output.get("name") == "stderr"], "a warning is shown to who runs it"


def test_notebooks_are_stored_without_outputs():
    """What a run makes stays out of the history: it would be of another machine, and soon of another version."""
    import nbformat

    assert NOTEBOOKS
    for path in NOTEBOOKS:
        code = [cell for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "code"]
        assert all(not cell.outputs and cell.execution_count is None for cell in code), path.name
        assert any("parameters" in cell.metadata.get("tags", ()) for cell in code), path.name
