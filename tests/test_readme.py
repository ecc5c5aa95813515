"""The README tells the truth: its Python runs, its commands parse, its tables are those of the code."""

import json
import re
import shlex

import pytest
from conftest import ROOT

README = (ROOT / "README.md").read_text("utf-8")
MAKEFILE = (ROOT / "Makefile").read_text("utf-8")


def blocks(language: str, text: str = README) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)


def commands(text: str = README) -> list[list[str]]:
    """The words of each shell command, without comments; commands of a pipe stand alone."""
    found = []
    for line in "".join(blocks("sh", text)).splitlines():
        for command in line.split(" | "):
            words = shlex.split(command, comments=True)
            found += [words] if words else []
    return found


def table(heading: str) -> list[list[str]]:
    """The cells of the table whose first column has this heading."""
    rows = README.split(f"| {heading} |", 1)[1].splitlines()[2:]
    return [
        [cell.strip() for cell in row.strip("|").split("|")]
        for row in rows[: next((i for i, row in enumerate(rows) if not row.startswith("|")), len(rows))]
    ]


def test_every_block_is_checked_here():
    languages = set(re.findall(r"^```(\w+)$", README + (ROOT / "CONTRIBUTING.md").read_text("utf-8"), re.MULTILINE))
    assert languages == {"sh", "python"}


def test_the_readme_opens_with_the_two_commands():
    assert commands()[:2] == [["make", "demo"], ["make", "test"]]
    assert README.index("make test") < README.index("GGUF")


def test_python_blocks_run(demo_model, tmp_path, monkeypatch, capsys):
    (tmp_path / "model.gguf").symlink_to(demo_model)
    (tmp_path / "notes.txt").write_text("no model")
    monkeypatch.chdir(tmp_path)
    namespace: dict = {}
    printed = []
    for block in blocks("python"):
        exec(compile(block, "README.md", "exec"), namespace)
        printed.append(capsys.readouterr().out)
    assert "Paris" in printed[0]
    assert printed[2] == "1 30\n"
    assert printed[3].splitlines()[1] == "64"
    assert json.loads(printed[4].split("\nconstraint TokenLogprob(")[0]).keys() == {"name", "age"}
    assert re.search(r"Paris.*length \d+ None\nsystem message \(tokenizer.chat_template\)\n$", printed[5], re.DOTALL)
    assert "blk.3.attn_q" in printed[6]
    assert any(text.splitlines()[-1:] == ["31 (2, 9, 7, 7)"] for text in printed)
    assert "notes.txt: not a GGUF file" in printed[-1]
    assert [len(logits) for logits in (namespace["a"].tokens, namespace["b"].tokens)] == [2, 9]


@pytest.mark.parametrize("words", commands(), ids=" ".join)
def test_commands_exist(words):
    program, *args = words
    if program == "make":
        assert re.search(rf"^{args[0]}:", MAKEFILE, re.MULTILINE), f"the Makefile has no target {args[0]}"
    elif program == "dasllama-torch":
        parse(args)
    elif program == "pip":
        assert args[0] == "install"
        torch = re.search(r"^TORCH \?= (.*)$", MAKEFILE, re.MULTILINE)[1]
        assert [torch, "setuptools>=77", "wheel"] == args[1:] or args[1:] == ["--no-build-isolation", "-e", "."]
    else:
        assert program == "echo"


def parse(args: list[str]) -> None:
    """Parse a command line of ours without running it; a wrong one raises."""
    import typer

    from dasllama_torch.cli import app

    group = typer.main.get_command(app)
    with group.make_context("dasllama-torch", list(args)) as context:
        name, command, rest = group.resolve_command(context, list(args))
        command.make_context(name, rest, parent=context)


def test_a_wrong_command_would_be_found():
    import typer

    for args in (["run", "m.gguf", "--tempo", "1"], ["generate", "m.gguf"], ["tokenize"]):
        with pytest.raises(typer.BadParameter.__mro__[1]):
            parse(args)


def test_the_makefile_and_ci_run_what_the_readme_says():
    ci = (ROOT / ".ci" / "run").read_text("utf-8")
    assert re.search(r"^make test$", ci, re.MULTILINE)
    assert re.search(r"\bmake (-s )?demo\b", ci)
    recipes = [line.removeprefix("\t$(BIN)/") for line in MAKEFILE.splitlines() if "$(BIN)/dasllama-torch" in line]
    assert recipes
    for recipe in recipes:
        parse(shlex.split(recipe.replace("$(MODEL)", "m").replace("$(PROMPT)", "p"))[1:])


def test_the_tables_are_those_of_the_code():
    from dasllama_torch import api, arch, ops

    named = [name.strip("` ") for row in table("architecture") for name in row[0].split(",")]
    assert sorted(named) == sorted(arch.FAMILIES)
    types = " ".join(row[1] for row in table("weights")).split()
    assert sorted(types) == sorted(kind.name for kind in ops.ggml_types.GGML_TYPES.values() if kind.is_weight)
    assert re.findall(r"`(\w+)`", " ".join(row[0] for row in table("mode"))) == list(api.MODES)


def test_every_error_is_named():
    import dasllama_torch as dl
    from dasllama_torch import errors

    ours = {name for name, value in vars(errors).items() if isinstance(value, type) and issubclass(value, Exception)}
    assert ours == {name for name in re.findall(r"`(\w+)`", README) if name in ours}
    assert all(getattr(dl, name) is getattr(errors, name) for name in ours)
