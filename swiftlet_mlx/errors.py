"""The exception tree: one class a cause, every message says what was found, what was needed, what to do.

Knows nothing of the rest of the package. Commands print `str(error)` and exit with `error.exit_code`; the server
turns the same text into its error body. Nothing in the package raises a bare Exception for a user's mistake.
"""

from __future__ import annotations


class SwiftletError(Exception):
    """Base of every error a user can meet. The message is complete without a traceback."""

    exit_code = 1


# ---- what the user asked for ------------------------------------------------------------------------------------


class OptionError(SwiftletError):
    """An argument or option cannot be honoured."""

    exit_code = 2


class BudgetTooSmall(OptionError):
    """The slot pool would not hold one layer's routed experts for a single token."""


class ModelNotFound(SwiftletError):
    """No container, checkpoint folder or bundled model goes by this name."""


class StreamingUnsupported(SwiftletError):
    """The model cannot be run with streamed experts. It is never loaded in full instead."""


# ---- files that do not say what they must -----------------------------------------------------------------------


class FormatError(SwiftletError):
    """A file from disk or network contradicts itself, or another file beside it."""


class SafetensorsError(FormatError):
    """A safetensors header is not to be believed."""


class CheckpointError(FormatError):
    """A checkpoint folder is incomplete, ambiguous or in a layout that cannot be streamed."""


class RawCheckpoint(CheckpointError):
    """The checkpoint is still in Hugging Face layout and must be converted to MLX first."""


class ConfigError(FormatError):
    """config.json is missing, unreadable, or does not fit the tensors."""


class ContainerError(FormatError):
    """A .qpack container is not what it claims to be."""


class NotAContainer(ContainerError):
    """There is no manifest with the magic QPACK."""


class UnknownVersion(ContainerError):
    """The container has a version this reader does not know."""


class MissingPart(ContainerError):
    """A file that the manifest or the layout names is not there."""


class WrongSize(ContainerError):
    """A file does not have the size that the manifest or the layout gives it."""


class UnsafePath(ContainerError):
    """A relative path would leave the folder."""


class BadStride(ContainerError):
    """The expert stride is not a multiple of 16384, or does not hold the sections."""


class SectionOutside(ContainerError):
    """A section does not lie inside the expert's blob."""


class SectionOverlap(ContainerError):
    """Two sections of a blob share bytes."""


class SectionSize(ContainerError):
    """A section's size is not what its dtype and shape give."""


class ConfigMismatch(ContainerError):
    """Counts in the layout disagree with config.json."""


class HashMismatch(ContainerError):
    """A file's bytes are not those that were hashed or copied."""


# ---- at run time ------------------------------------------------------------------------------------------------


class ReadFailed(SwiftletError):
    """An expert could not be read. Names file, layer, expert, offset, wanted and got."""


class RepackError(SwiftletError):
    """A container could not be written."""


class OutputExists(RepackError):
    """The output path is taken by something that will not be overwritten."""


# ---- installing from a hub or a mirror --------------------------------------------------------------------------


class InstallError(SwiftletError):
    """A model could not be installed. What was fetched so far is kept unless the message says otherwise."""


class SourceNotFound(InstallError):
    """The hub or the mirror has no such repository, revision or file."""


class AccessDenied(InstallError):
    """The source is private or gated and the token, if any, does not open it."""


class NetworkFailed(InstallError):
    """The source could not be reached, or went silent, for longer than is worth waiting."""


class SourceChanged(InstallError):
    """The source is not what it was when the installation began."""


class SourceBroken(InstallError):
    """The source serves something other than what it announces: a web page, a pointer, too few bytes, other bytes."""


class NotResumable(InstallError):
    """An unfinished installation lies here that was begun from another source or with other settings."""


class DiskFull(InstallError):
    """The target's file system has no room for what is still to come."""


class Cancelled(InstallError):
    """The installation was stopped from outside; it can be continued."""

    exit_code = 130


# ---- conversations ----------------------------------------------------------------------------------------------


class SamplingError(OptionError):
    """A generation option is out of range. `param` is its name."""

    def __init__(self, message: str, *, param: str) -> None:
        super().__init__(message)
        self.param = param


class MessageError(SwiftletError):
    """A message cannot be given to this model. `index` is its place in the list, if one message is to blame."""

    def __init__(self, message: str, *, index: int | None = None) -> None:
        super().__init__(message)
        self.index = index


class NoChatTemplate(MessageError):
    """The tokenizer has no chat template, so a conversation cannot be written down for the model."""


class ContextFull(SwiftletError):
    """History plus reply do not fit the context."""

    def __init__(self, message: str, *, prompt_tokens: int, reply_tokens: int, context_tokens: int) -> None:
        super().__init__(message)
        self.prompt_tokens = prompt_tokens
        self.reply_tokens = reply_tokens
        self.context_tokens = context_tokens


class MemoryFull(ContextFull):
    """The prompt's key-value cache and hidden states do not fit into memory. `context_tokens` is what does."""


class EngineClosed(SwiftletError):
    """The engine has been closed and takes no more work."""


class EngineFailed(SwiftletError):
    """The model could not be loaded, so the engine never became ready. The cause is chained."""


class EngineBusy(SwiftletError):
    """As many requests wait as may wait. `waiting` says how many."""

    def __init__(self, message: str, *, waiting: int) -> None:
        super().__init__(message)
        self.waiting = waiting


class GenerationFailed(SwiftletError):
    """A step of one reply raised. That reply is lost, the engine goes on. The cause is chained."""


class SessionBusy(SwiftletError):
    """The session is still answering. Cancel or finish the reply first."""


class SessionFileError(FormatError):
    """A saved session is damaged, or not one."""


class WrongModel(SessionFileError):
    """A saved session belongs to another model."""
