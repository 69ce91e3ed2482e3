"""Messages to text: the special tokens, the Jinja template, and a plain Python twin of it that marks what is learned.

Knows the format of the Qwen3.6 family (roles between <|im_start|> and <|im_end|>, thoughts between <think> and
</think>, tool calls as XML). Does not know what is said.
Invariant: `render` gives the text that `CHAT_TEMPLATE` gives, cut into pieces; `check_twin` holds it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

# In the order of their ids, which follow the ordinary vocabulary as in Qwen's tokenizers.
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
# Tokens of their own that decoding keeps as text, because parsers read them.
PLAIN_TOKENS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")

TOOLS_BEFORE = "# Tools\n\nYou can call these functions:\n<tools>"
TOOLS_AFTER = (
    "\n</tools>\n\nTo call one, answer like this:\n<tool_call>\n<function=NAME>\n<parameter=KEY>\nVALUE\n</parameter>\n"
    "</function>\n</tool_call>"
)

# Thinking is off unless asked for: a newcomer's first answer is the answer. (Qwen3.6-35B has it on by default, its
# small siblings off.) Earlier turns lose their thoughts; turns after the last question keep them, as large models do.
CHAT_TEMPLATE = (
    """\
{%- if not messages %}{{ raise_exception('No messages provided.') }}{%- endif %}
{%- set first_is_system = messages[0].role == 'system' %}
{%- if tools %}
{{- '<|im_start|>system\\n' + """
    + repr(TOOLS_BEFORE)
    + """ }}
{%- for tool in tools %}{{- '\\n' + (tool | tojson) }}{%- endfor %}
{{- """
    + repr(TOOLS_AFTER)
    + """ }}
{%- if first_is_system %}{{- '\\n\\n' + messages[0].content | trim }}{%- endif %}
{{- '<|im_end|>\\n' }}
{%- elif first_is_system %}
{{- '<|im_start|>system\\n' + messages[0].content | trim + '<|im_end|>\\n' }}
{%- endif %}
{%- set found = namespace(last_question=-1) %}
{%- for message in messages %}
{%- if message.role == 'user' %}{%- set found.last_question = loop.index0 %}{%- endif %}
{%- endfor %}
{%- for message in messages %}
{%- if message.content is string %}{%- set content = message.content | trim %}
{%- elif message.content is iterable and message.content is not mapping %}
{%- set parts = namespace(text='') %}
{%- for part in message.content %}
{%- if part.text is defined %}{%- set parts.text = parts.text + part.text %}
{%- else %}{{- raise_exception('Only text is understood here.') }}{%- endif %}
{%- endfor %}
{%- set content = parts.text | trim %}
{%- else %}{%- set content = '' %}{%- endif %}
{%- if message.role == 'system' %}
{%- if not loop.first %}{{- raise_exception('System message must be at the beginning.') }}{%- endif %}
{%- elif message.role == 'user' %}
{{- '<|im_start|>user\\n' + content + '<|im_end|>\\n' }}
{%- elif message.role == 'assistant' %}
{%- set thought = '' %}
{%- if message.reasoning_content is string %}{%- set thought = message.reasoning_content | trim %}
{%- elif '</think>' in content %}
{%- set thought = content.split('</think>')[0].split('<think>')[-1] | trim %}
{%- set content = content.split('</think>')[-1] | trim %}
{%- endif %}
{{- '<|im_start|>assistant\\n' }}
{%- if loop.index0 > found.last_question %}{{- '<think>\\n' + thought + '\\n</think>\\n\\n' }}{%- endif %}
{{- content }}
{%- if message.tool_calls %}
{%- for call in message.tool_calls %}
{%- if call.function is defined %}{%- set call = call.function %}{%- endif %}
{%- if not loop.first or content %}{{- '\\n' if not loop.first else '\\n\\n' }}{%- endif %}
{{- '<tool_call>\\n<function=' + call.name + '>\\n' }}
{%- for key, value in (call.arguments or {}) | items %}
{{- '<parameter=' + key + '>\\n' + (value if value is string else value | tojson) + '\\n</parameter>\\n' }}
{%- endfor %}
{{- '</function>\\n</tool_call>' }}
{%- endfor %}
{%- endif %}
{{- '<|im_end|>\\n' }}
{%- elif message.role == 'tool' %}
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}
{{- '\\n<tool_response>\\n' + content + '\\n</tool_response>' }}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\\n' }}{%- endif %}
{%- else %}{{- raise_exception('Unexpected message role.') }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\\n<think>\\n' }}
{%- if not (enable_thinking is defined and enable_thinking is true) %}{{- '\\n</think>\\n\\n' }}{%- endif %}
{%- endif %}
"""
)


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One call with arguments that are all strings."""

    name: str
    arguments: dict[str, str]


@dataclass(frozen=True, slots=True)
class Message:
    """One message. `thought` and `call` belong to the assistant only."""

    role: str
    content: str
    thought: str = ""
    call: ToolCall | None = None

    def as_dict(self) -> dict[str, Any]:
        """The message as OpenAI clients write it."""
        result: dict[str, Any] = {"role": self.role, "content": self.content}
        if self.thought:
            result["reasoning_content"] = self.thought
        if self.call:
            function = {"name": self.call.name, "arguments": self.call.arguments}
            result["tool_calls"] = [{"type": "function", "function": function}]
        return result


@dataclass(frozen=True, slots=True)
class Conversation:
    """Messages in order, beginning with at most one system message; `tools_json` is one JSON text a tool."""

    kind: str
    messages: tuple[Message, ...]
    tools_json: tuple[str, ...] = ()
    # What a right last answer contains, for the evaluation; empty where a conversation is only trained on.
    expected: tuple[str, ...] = field(default=())


def _answer_text(message: Message) -> str:
    text = message.content
    if message.call:
        parameters = "".join(f"<parameter={k}>\n{v}\n</parameter>\n" for k, v in message.call.arguments.items())
        text += (
            "\n\n" if text else ""
        ) + f"<tool_call>\n<function={message.call.name}>\n{parameters}</function>\n</tool_call>"
    return text


def render(conversation: Conversation, *, think: bool, keep_blocks: bool = False) -> list[tuple[str, bool]]:
    """The conversation as pieces of text, each with whether the model learns to write it.

    Args:
        conversation: what is said.
        think: whether the last answers open with their thought or with an empty one.
        keep_blocks: earlier answers keep an empty thought, as in a session that never renders its past anew.

    Returns:
        Pieces whose concatenation is the whole text. No token crosses their borders, which follow a newline or a
        special token.
    """
    pieces: list[tuple[str, bool]] = []
    messages = conversation.messages
    system = messages[0].content.strip() if messages[0].role == "system" else ""
    if conversation.tools_json:
        text = TOOLS_BEFORE + "".join("\n" + tool for tool in conversation.tools_json) + TOOLS_AFTER
        pieces.append((f"<|im_start|>system\n{text}" + (f"\n\n{system}" if system else "") + "<|im_end|>\n", False))
    elif system:
        pieces.append((f"<|im_start|>system\n{system}<|im_end|>\n", False))
    last_question = max(i for i, message in enumerate(messages) if message.role == "user")
    for i, message in enumerate(messages):
        if message.role == "user":
            pieces.append((f"<|im_start|>user\n{message.content.strip()}<|im_end|>\n", False))
        elif message.role == "tool":
            pieces.append(
                (f"<|im_start|>user\n<tool_response>\n{message.content.strip()}\n</tool_response><|im_end|>\n", False)
            )
        elif message.role == "assistant":
            answer = _answer_text(message) + "<|im_end|>"
            if i > last_question and think and message.thought:
                pieces.append(("<|im_start|>assistant\n<think>\n", False))
                pieces.append((f"{message.thought}\n</think>\n\n", True))
            elif i > last_question or keep_blocks:
                pieces.append(("<|im_start|>assistant\n<think>\n\n</think>\n\n", False))
            else:
                pieces.append(("<|im_start|>assistant\n", False))
            pieces.append((answer, True))
            pieces.append(("\n", False))
    return pieces
