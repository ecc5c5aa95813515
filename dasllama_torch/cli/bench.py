"""`bench`: tokens per second."""

import dataclasses
import json
from pathlib import Path
from typing import Annotated, Any

import typer

from .models import load, start_torch
from .options import DeviceOption, KVOption, KVType, Mode, ModelArgument, ModeOption, ThreadsOption
from .output import printable, status


def command(
    model: ModelArgument,
    prompt: Annotated[int, typer.Option("--prompt", "-p", min=1, help="Tokens of the prompt.")] = 512,
    generate: Annotated[int, typer.Option("--generate", "-n", min=1, help="Tokens to generate.")] = 64,
    depth: Annotated[int, typer.Option("--depth", "-d", min=0, help="Tokens in the context before those.")] = 0,
    batch: Annotated[int, typer.Option("--batch", "-b", min=1, help="Sessions that generate together.")] = 1,
    repetitions: Annotated[int, typer.Option("--repetitions", "-r", min=1, help="Times that each is measured.")] = 5,
    mode: ModeOption = Mode.native,
    kv: KVOption = KVType.f16,
    device: DeviceOption = "cpu",
    threads: ThreadsOption = None,
    profile: Annotated[
        bool, typer.Option("--profile", help="Show each op's time, and what this machine could do at best.")
    ] = False,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write all samples to this file too.")] = None,
) -> None:
    """Measure tokens per second. Those of a prompt are called pp, those of generation tg."""
    if profile and device != "cpu":
        raise typer.BadParameter(f"--profile is of the CPU's ops, and --device is {device}")
    start_torch(threads)
    import torch

    from dasllama_torch import bench as measure

    loaded, path = load(model, mode, device)
    used = torch.get_num_threads()
    facts: dict[str, Any] = {"model": str(path), "mode": mode.value, "kv": kv.value, "device": device}
    facts |= {"threads": used, "speeds": []}
    where = f"{used} threads" if device == "cpu" else f"device {device}"
    print(f"{printable(path.name)}, mode {mode.value}, KV cache {kv.value}, {where}")
    print(f"{'test':24} {'tok/s':>9} {'spread':>7}")
    tests = [
        (f"reading {prompt} tokens", lambda: measure.measure_prefill(loaded, prompt, repetitions, kv.value)),
        (
            f"generating {generate} tokens",
            lambda: measure.measure_decode(loaded, generate, repetitions, kv.value, depth, batch),
        ),
    ]
    for what, test in tests:
        with status(what):
            speed = test()
        print(f"{speed.test:24} {speed.median:9.1f} {speed.spread:7.0%}", flush=True)
        facts["speeds"].append(dataclasses.asdict(speed) | {"median": speed.median})
    if profile:
        with status("measuring the ceilings"):
            ceilings = measure.Ceilings.measure()
        facts["ceilings"] = dataclasses.asdict(ceilings)
        for title, rows in measure.profile(loaded, prompt, generate, depth, kv.value).items():
            print(f"\n{title}\n{measure.profile_table(rows, ceilings)}")
            facts.setdefault("profiles", {})[title] = [dataclasses.asdict(row) for row in rows]
    if json_file is not None:
        json_file.write_text(json.dumps(facts, indent=1) + "\n", "utf-8")
