"""What a prompt costs whose beginning has been evaluated before: attaching its pages against evaluating them.

    python benchmarks/prefix_cache.py model.gguf --tokens 4000

Milliseconds on one thread. attach: medians of --rounds sessions, each of which takes all full pages of the prompt; the
prompts that fill the cache differ from their first page on. turn: a chat's next turn of 20 tokens, by a session that
stands there and by a new one; evaluate: the prompt itself.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch

import dasllama_torch as dl

PASSAGE = Path(__file__).parent / "passage.txt"
TURN = 20


def ms(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return 1e3 * (time.perf_counter() - start)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--tokens", type=int, default=4000)
    parser.add_argument("--others", type=int, default=4, help="further prompts that the cache holds")
    parser.add_argument("--rounds", type=int, default=51)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    model = dl.load_model(options.model)
    passage = model.encode(PASSAGE.read_text("utf-8"))
    ids = (passage * (options.tokens // len(passage) + 1))[: options.tokens]
    n_ctx = options.tokens + 2 * TURN

    with dl.create_prefix_cache(model, dl.create_kv_pool(model), max_bytes=1 << 34) as cache:

        def session() -> dl.Session:
            return dl.create_session(model, n_ctx=n_ctx, prefix_cache=cache)

        for other in range(options.others):
            with session() as each:
                each.eval([other, *ids[1:]], logits=None)
        stands = session()
        evaluate = ms(lambda: stands.prefill(ids))
        attach = []
        for _ in range(options.rounds):
            with session() as each:
                attach.append(ms(lambda each=each: dl.prefix_attach(each, ids)))
                attached = each.n_past
        further = ids + passage[:TURN]
        turns = [ms(lambda: stands.prefill(further))]
        with session() as each:
            turns.append(ms(lambda: each.prefill(further)))
            reused = each.stats.reused_tokens
        print(f"{Path(options.model).name}: {len(ids)} tokens, {dl.prefix_held_groups(cache)} pages of 64 kept")
        print(f"evaluate            {evaluate:10.2f} ms")
        print(f"attach {attached:5} tokens {statistics.median(attach):10.2f} ms, worst {max(attach):.2f}")
        print(f"turn, same session  {turns[0]:10.2f} ms, {TURN} tokens evaluated")
        print(f"turn, new session   {turns[1]:10.2f} ms, {len(further) - reused} tokens evaluated")
        stands.close()


if __name__ == "__main__":
    main()
