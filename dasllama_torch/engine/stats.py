"""What a session says about its last prompt and the text behind it."""

from dataclasses import dataclass, field

from dasllama_torch.sampling import TokenLogprob


@dataclass
class Stats:
    """Of the last `generate` or `prefill`, or of the `eval` that began a session of a prefix cache. Times in seconds,
    rates in tokens per second.

    n_prompt: tokens of the prompt; reused_tokens: those of them that were not evaluated, as the session or its prefix
    cache held them. first_difference: index of the first token at which the prompt departs from the history that agrees
    with it longest, of those that the session and its prefix cache hold; None if that history does not go on.
    n_generated: tokens yielded. prefill_s: time to evaluate the prompt. ttft_s: time to the first token. decode_s: from
    the first token to the last. stop: why it ended: "eog" (end of generation), "stop" (a stop string or stop id),
    "constraint" (the constraint's language has nothing further), "length" (max_tokens), "context", or "caller", which
    also stands there while it runs and after an error. stopped_by: the token id or the string of "eog" and "stop".
    logprobs: of each token yielded, where `SamplingParams.logprobs` asks for them. shifts: how often the session
    shifted meanwhile, and reevaluated_tokens: what that made it evaluate once more.
    """

    n_prompt: int = 0
    reused_tokens: int = 0
    first_difference: int | None = None
    n_generated: int = 0
    prefill_s: float = 0.0
    ttft_s: float = 0.0
    decode_s: float = 0.0
    stop: str = "caller"
    stopped_by: int | str | None = None
    logprobs: list[TokenLogprob] = field(default_factory=list)
    shifts: int = 0
    reevaluated_tokens: int = 0

    @property
    def prefilled_tokens(self) -> int:
        """Tokens of the prompt that were evaluated."""
        return self.n_prompt - self.reused_tokens

    @property
    def prefill_tps(self) -> float:
        return self.prefilled_tokens / self.prefill_s if self.prefill_s else 0.0

    @property
    def decode_tps(self) -> float:
        return (self.n_generated - 1) / self.decode_s if self.decode_s else 0.0
