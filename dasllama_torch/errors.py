"""Every error that this package raises on purpose. Messages name the file or key, what was found, what was wanted."""


class DasllamaError(Exception):
    """Base of all errors of this package; a command line shows its text as one line."""


class GGUFError(DasllamaError):
    """The file is not a GGUF file that can be read: truncated, inconsistent, hostile or of an unknown version."""


class UnsupportedModel(DasllamaError):
    """The file is well formed and asks for something that this package does not implement, or its model is asked for
    something that it cannot do."""


class TokenizerError(DasllamaError):
    """The file's vocabulary is missing, inconsistent, or of a kind that is not implemented."""


class OutOfPages(DasllamaError):
    """The KV pool has no free page left; the session keeps what it held before the call."""


class OutOfMemory(DasllamaError):
    """A device has less memory left than a model's weights take; nothing was moved there."""


class ContextFull(DasllamaError):
    """The tokens do not fit in the session's `n_ctx`; nothing was evaluated."""


class CannotRewind(DasllamaError):
    """A session cannot go back to that position exactly: a window or a recurrent state has forgotten what it needs."""


class SessionFileError(DasllamaError):
    """A file holds no session that can go on: broken, of another model, or kept in another way than the pool does."""


class KernelError(DasllamaError):
    """A kernel was asked for that this machine or build lacks, or a strict run met a fallback."""


class FolderError(DasllamaError):
    """A folder holds no model of transformers that can be read: a file is missing, broken or does not fit the
    others."""


class DownloadError(DasllamaError):
    """A model could not be fetched, or what arrived does not match its checksum."""


class UnknownName(DasllamaError, KeyError):
    """A name stands for nothing in a model, or for nothing that was recorded."""

    __str__ = Exception.__str__  # a KeyError would quote its text


class TemplateError(DasllamaError):
    """A chat template is missing, broken, was stopped, or refuses the conversation. index, role: of the message that it
    was busy with, None where that is not known.
    """

    def __init__(self, text: str, *, index: int | None = None, role: str | None = None):
        super().__init__(text)
        self.index = index
        self.role = role


class ConstraintError(DasllamaError):
    """A constraint is broken or too large, names tokens that the vocabulary lacks, or cannot be met by it."""
