"""How an assistant's turn ends: found out by asking the template, since no key of the file says it."""

from dataclasses import dataclass
from itertools import takewhile

from dasllama_torch.errors import TemplateError
from dasllama_torch.text.tokenizer import Tokenizer

from .escape import cut
from .template import ChatTemplate

_REPLY, _NEXT = "Replyprobe", "nextprobe"
_TURN = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": _REPLY}]


@dataclass(frozen=True, slots=True)
class Closing:
    """ids: what every prompt has behind a reply without calls, up to the next turn; empty where the next turn's
    beginning is the end. end: the control token by which the model ends its turn, None where that is none."""

    ids: tuple[int, ...]
    end: int | None

    @classmethod
    def of(cls, template: ChatTemplate, tokenizer: Tokenizer) -> "Closing":
        """Nothing is known of a template that refuses a plain conversation."""
        try:
            last = _behind_reply(template, tokenizer, _TURN)
            within = _behind_reply(template, tokenizer, [*_TURN, {"role": "user", "content": _NEXT}])
        except TemplateError:
            return cls((), None)
        shared = tuple(a for a, b in takewhile(lambda pair: pair[0] == pair[1], zip(last, within, strict=False)))
        # Some close the last reply with a token of its own, for training, which no prompt has (gpt-oss: <|return|>).
        ids = shared or tuple(within[:1] if last else ())
        end = next((token for token in (last or within)[:1] if tokenizer.is_control(token)), None)
        return cls(ids, end)


def _behind_reply(template: ChatTemplate, tokenizer: Tokenizer, messages: list[dict]) -> list[int]:
    """The ids of what stands between the reply and the end, or the next message's text."""
    segments = template.segments(messages)
    text = "".join(segment.text for segment in segments)
    if _REPLY not in text:
        return []
    start = text.rindex(_REPLY) + len(_REPLY)
    stop = text.find(_NEXT, start)
    before = tokenizer.encode_segments(cut(segments, 0, start))
    return tokenizer.encode_segments(cut(segments, start, stop if stop >= 0 else len(text)), prev_id=before[-1])
