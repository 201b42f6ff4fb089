"""Chats as text: how they are written, and which characters are the assistant's own words.

A folder's own template is rendered by `transformers`. Of each answer the words are what the chat up to it adds to the
chat before it with the assistant's turn begun; so the token that ends the turn counts as well. A template that writes
earlier turns in another way once later ones are there says nothing of its words, and is refused.
"""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from unisono.train.data.tokenised.cutters import Encoded, Folder

_ROLES = {"human": "user", "gpt": "assistant", "bot": "assistant", "model": "assistant"}
ASSISTANT = "assistant"
WEIGHT = "weight"  # of an assistant's message: 0 keeps its words out of the loss
_TRIES = 8  # chats in which a key changed nothing, after which nobody asks again
Message = Mapping[str, Any]
Tools = Sequence[Any] | None


class Write(Protocol):
    """How a chat is written. begun: whether the assistant's turn is begun behind the messages."""

    def __call__(self, messages: Sequence[Message], begun: bool, tools: Tools = None) -> str: ...


class BadRecord(ValueError):
    """A record that cannot be read; its text says why."""


@dataclass(frozen=True, slots=True)
class Wording:
    """A text, and where in it stand the words that count: (first, end) in characters; None: all of it. closed: it
    begins and ends as a template wants it, so nothing is put around it. remarks: what a user may not expect of its
    record, each in a few words."""

    text: str
    answers: tuple[tuple[int, int], ...] | None = None
    closed: bool = False
    remarks: tuple[str, ...] = ()


def messages_of(value: Any) -> list[Message]:
    """Checked messages, with a role and content each; those of other spellings in ours. Raises BadRecord."""
    if not isinstance(value, list) or not value:
        raise BadRecord("its messages are no list, or an empty one")
    return [_message(i, message) for i, message in enumerate(value)]


def _message(at: int, entry: Any) -> Message:
    if not isinstance(entry, Mapping):
        raise BadRecord(f"message {at + 1} is no object with role and content")
    role, content = entry.get("role", entry.get("from")), entry.get("content", entry.get("value"))
    if not isinstance(role, str) or not role:
        raise BadRecord(f"message {at + 1} has no role")
    if not isinstance(content, str) and not (content is None and entry.get("tool_calls")):
        raise BadRecord(f"the content of message {at + 1} is no text")
    rest = {key: value for key, value in entry.items() if key not in ("from", "value")}
    return {**rest, "role": _ROLES.get(role, role), "content": content}


def tools_of(value: Any) -> Tools:
    """The tools of a record, a list or the JSON of one; None where it has none. Raises BadRecord."""
    if isinstance(value, str) and value:
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise BadRecord(f"its tools are no JSON: {error}") from error
    if value and not isinstance(value, list):
        raise BadRecord("its tools are no list")
    return value or None


def plain(messages: Sequence[Message], begun: bool, tools: Tools = None) -> str:
    """A line a message, `role: content`, for tokenizers that bring no template."""
    lines = "".join(f"{message['role']}: {message['content'] or ''}\n" for message in messages)
    return lines + f"{ASSISTANT}: " if begun else lines


def template_of(folder: Folder) -> Write:
    """The folder's own template."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(folder.folder), local_files_only=True)

    def write(messages: Sequence[Message], begun: bool, tools: Tools = None) -> str:
        try:
            return tokenizer.apply_chat_template(
                list(messages), tools=tools, tokenize=False, add_generation_prompt=begun
            )
        except Exception as error:  # a template may refuse in any way that it likes
            raise BadRecord(f"the chat template refuses it: {error}") from error

    return write


@dataclass(frozen=True, slots=True)
class KeysRead:
    """Which keys of chats, beside role and content, change what is written. changed: those that did. tried: in how many
    chats each of the others did not."""

    write: Write
    changed: set[str] = field(default_factory=set)
    tried: Counter[str] = field(default_factory=Counter)

    def ignored(self, messages: Sequence[Message], tools: Tools, weighed: bool) -> list[str]:
        """Keys of this chat that nothing reads, such as `name of messages`. weighed: its messages' weights are read."""
        keys = dict.fromkeys(key for message in messages for key in _beside(message, weighed))
        idle = [f"{key} of messages" for key in keys if not self._reads(key, messages, tools)]
        return [*idle, *(["tools"] if tools and not self._reads("", messages, tools) else [])]

    def _reads(self, key: str, messages: Sequence[Message], tools: Tools) -> bool:
        """key: "" for the tools."""
        if key in self.changed or self.write is plain or self.tried[key] >= _TRIES:
            return key in self.changed
        less = [{name: value for name, value in message.items() if name != key} for message in messages]
        try:
            same = self.write(less, False, tools if key else None) == self.write(messages, False, tools)
        except BadRecord:  # it insists on the key
            same = False
        self.tried[key] += same
        self.changed.update(() if same else (key,))
        return not same


def _beside(message: Message, weighed: bool) -> list[str]:
    read = {"role", "content", *([WEIGHT] if weighed and message["role"] == ASSISTANT else [])}
    return [key for key, value in message.items() if key not in read and value not in (None, "", [], {})]


def written(messages: Sequence[Message], write: Write, first: int = 0, tools: Tools = None) -> Wording:
    """The chat, and the words of those of its assistant's messages that are not before message `first` and do not have
    the weight 0. Raises BadRecord."""
    turns = [i for i, message in enumerate(messages) if message["role"] == ASSISTANT and i >= first]
    if not turns:
        raise BadRecord(f"no message of it is by the {ASSISTANT}, so it has nothing to learn")
    turns = [i for i in turns if _weight(i, messages[i])]
    if not turns:
        raise BadRecord(f"all messages of the {ASSISTANT} have the weight 0, so it has nothing to learn")
    text, spans = write(messages, False, tools), []
    for i in turns:
        after = write(messages[: i + 1], False, tools)
        before = write(messages[:i], True, tools) if i else ""
        if not after.startswith(
            before
        ):  # what begins a turn may be more than any turn has, such as a thought
            before = write(messages[:i], False, tools)
        if not (after.startswith(before) and text.startswith(after)):
            raise BadRecord(
                "the template writes earlier turns in another way once later ones follow, so it does not say which"
                " words are the assistant's: data.answers_only = false, or one answer a record"
            )
        spans.append((len(before), len(after)))
    return Wording(text, tuple(spans), write is not plain)


def _weight(at: int, message: Message) -> int:
    weight = message.get(WEIGHT)
    if weight not in (None, 0, 1):
        raise BadRecord(f"the weight of message {at + 1} is {weight!r}: 0 or 1 can be had")
    return 1 if weight is None else int(weight)


def counted(tokens: Encoded, answers: Sequence[tuple[int, int]]) -> tuple[bytearray, bool]:
    """(of each token 1 where a letter of it belongs to an answer, whether one of these begins before its answer)."""
    starts, ends = tokens.starts, tokens.ends
    marks, at, over = bytearray(len(starts)), 0, False
    for first, end in answers:
        while at < len(starts) and starts[at] < first and ends[at] <= first:
            at += 1
        over |= at < len(starts) and starts[at] < first
        while at < len(starts) and starts[at] < end:
            marks[at] = starts[at] >= first or ends[at] > first  # those that a tokenizer adds stand at 0
            at += 1
    return marks, over
