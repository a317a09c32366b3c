"""Chat templates with the published behaviour of model families, written for these tests.

Each has the special tokens and the peculiarities of its family, in as few words as possible.
"""

from typing import Any, NamedTuple

from partita.tokenizers.load import byte_pair_backend, wrap

TEXTS = [
    'What is the weather in Paris? {"city": "Paris", "days": 2} <think>\nThe user asks.\n</think>\n\nIt is sunny. ',
    '{"type": "function", "function": {"name": "get_weather", "description": "Weather of a city."}} assistant user ',
]


class Family(NamedTuple):
    """A family of models."""

    template: str
    tokens: tuple[str, ...]
    """Special tokens that are not the end token."""
    end: str
    """The end-of-sequence token."""
    begin: str = ""
    """The beginning-of-sequence token, which the template writes."""
    shown_tokens: tuple[str, ...] = ()
    """Added tokens that are not special: decoding keeps them."""

    def tokenizer(self) -> Any:
        """Return a byte pair tokenizer with the template."""
        tokenizer = wrap(byte_pair_backend(TEXTS * 20, vocab_size=330), max_length=None)
        tokenizer.add_special_tokens({"eos_token": self.end} | ({"bos_token": self.begin} if self.begin else {}))
        tokenizer.add_special_tokens({"additional_special_tokens": list(self.tokens)})
        tokenizer.add_tokens(list(self.shown_tokens))
        tokenizer.chat_template = self.template
        return tokenizer


# The first user turn holds the tools, the system turn a date. One call in a message, whose content is dropped.
LLAMA_3 = Family(
    """{{ bos_token }}{% set date = date_string | default('26 Jul 2024') %}
{%- if messages[0].role == 'system' %}{% set system = messages[0].content %}{% set messages = messages[1:] %}
{%- else %}{% set system = '' %}{% endif -%}
{{- '<|start_header_id|>system<|end_header_id|>\n\n' + ('Environment: ipython\n' if tools else '') -}}
{{- 'Today Date: ' + date + '\n\n' + system + '<|eot_id|>' -}}
{%- if tools %}{{ '<|start_header_id|>user<|end_header_id|>\n\nRespond with JSON for a function call.\n\n' -}}
{%- for tool in tools %}{{ tool | tojson(indent=4) }}{{ '\n\n' }}{% endfor -%}
{{- messages[0].content | trim + '<|eot_id|>' }}{% set messages = messages[1:] %}{% endif %}
{%- for message in messages %}
{%- if message.role not in ('tool', 'ipython') and 'tool_calls' not in message -%}
{{- '<|start_header_id|>' + message.role + '<|end_header_id|>\n\n' + message.content | trim + '<|eot_id|>' -}}
{%- elif 'tool_calls' in message %}
{%- if message.tool_calls | length != 1 %}
{{- raise_exception('This model only supports single tool-calls at once!') }}{% endif %}
{%- set call = message.tool_calls[0].function -%}
{{- '<|start_header_id|>assistant<|end_header_id|>\n\n{"name": "' + call.name + '", "parameters": ' -}}
{{- call.arguments | tojson }}{{ '}<|eot_id|>' -}}
{%- else -%}
{{- '<|start_header_id|>ipython<|end_header_id|>\n\n' + message.content | tojson + '<|eot_id|>' -}}
{%- endif %}{% endfor %}
{%- if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}""",
    ("<|start_header_id|>", "<|end_header_id|>", "<|eom_id|>"),
    end="<|eot_id|>",
    begin="<|begin_of_text|>",
)

QWEN_TOOLS = """{%- if messages[0].role == 'system' %}{% set system = messages[0].content %}
{%- else %}{% set system = DEFAULT %}{% endif %}
{%- if tools -%}
{{- '<|im_start|>system\n' + system + '\n\n# Tools\n\n<tools>' -}}
{%- for tool in tools %}{{ '\n' }}{{ tool | tojson }}{% endfor %}{{ '\n</tools><|im_end|>\n' -}}
{%- elif system %}{{ '<|im_start|>system\n' + system + '<|im_end|>\n' }}{% endif %}"""
QWEN_CALLS = """{%- for call in message.tool_calls or [] -%}
{{- '\n<tool_call>\n{"name": "' + call.function.name + '", "arguments": ' -}}
{{- call.function.arguments if call.function.arguments is string else call.function.arguments | tojson -}}
{{- '}\n</tool_call>' }}{% endfor %}"""
# Results of tools are a user turn, several in a row are one.
QWEN_RESULTS = """{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{ '<|im_start|>user' }}{% endif -%}
{{- '\n<tool_response>\n' + message.content + '\n</tool_response>' -}}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{ '<|im_end|>\n' }}{% endif %}"""
QWEN_TOKENS = ("<tool_call>", "</tool_call>", "<think>", "</think>")

QWEN_2_5 = Family(
    QWEN_TOOLS.replace("DEFAULT", "'You are Qwen.'")
    + "{% for message in messages %}{% if message.role == 'tool' %}"
    + QWEN_RESULTS
    + """{%- elif message.role == 'assistant' -%}
{{- '<|im_start|>assistant' + ('\n' + message.content if message.content else '') -}}"""
    + QWEN_CALLS
    + """{{- '<|im_end|>\n' -}}
{%- elif message.role != 'system' or not loop.first -%}
{{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}{% endif %}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}""",
    ("<|im_start|>",),
    end="<|im_end|>",
    shown_tokens=QWEN_TOKENS,
)
# Thoughts stay only after the last question of the user; a last answer always has one, which may be empty.
QWEN_3 = Family(
    QWEN_TOOLS.replace("DEFAULT", "''")
    + """{%- set last = namespace(question=0) %}
{%- for message in messages %}{% if message.role == 'user' %}{% set last.question = loop.index0 %}{% endif %}
{%- endfor %}{% for message in messages %}{% if message.role == 'tool' %}"""
    + QWEN_RESULTS
    + """{%- elif message.role == 'assistant' %}
{%- set thought = message.reasoning_content or '' %}{% set content = message.content or '' %}
{%- if '</think>' in content %}{% set thought = content.split('</think>')[0].split('<think>')[-1] %}
{%- set content = content.split('</think>')[-1].lstrip('\n') %}{% endif -%}
{{- '<|im_start|>assistant\n' -}}
{%- if loop.index0 > last.question and (loop.last or thought) -%}
{{- '<think>\n' + thought.strip('\n') + '\n</think>\n\n' }}{% endif %}{{- content -}}"""
    + QWEN_CALLS
    + """{{- '<|im_end|>\n' -}}
{%- elif message.role != 'system' or not loop.first -%}
{{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}{% endif %}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}
{%- if enable_thinking is defined and enable_thinking is false %}{{ '<think>\n\n</think>\n\n' }}{% endif %}
{%- endif %}""",
    ("<|im_start|>",),
    end="<|im_end|>",
    shown_tokens=QWEN_TOKENS,
)

# Tools stand before the last question, the system text in it. Ids of calls have nine characters.
MISTRAL = Family(
    """{{ bos_token }}{% set system = '' %}
{%- if messages[0].role == 'system' %}{% set system = messages[0].content %}{% set messages = messages[1:] %}{% endif %}
{%- set last = namespace(question=0) %}
{%- for message in messages %}{% if message.role == 'user' %}{% set last.question = loop.index0 %}{% endif %}
{%- endfor %}
{%- for message in messages %}
{%- if message.role == 'user' %}
{%- if tools and loop.index0 == last.question %}{{ '[AVAILABLE_TOOLS] ' }}{{ tools | tojson }}{{ '[/AVAILABLE_TOOLS]' }}
{%- endif -%}
{{- '[INST] ' + (system + '\n\n' if system and loop.index0 == last.question else '') + message.content + '[/INST]' -}}
{%- elif message.role == 'tool' %}
{%- if message.tool_call_id is undefined or message.tool_call_id | length != 9 %}
{{- raise_exception('Tool call IDs should be alphanumeric strings with length 9!') }}{% endif -%}
{{- '[TOOL_RESULTS] {"content": ' + message.content + ', "call_id": "' + message.tool_call_id + '"}' -}}
{{- '[/TOOL_RESULTS]' -}}
{%- elif message.tool_calls %}{{ '[TOOL_CALLS] [' }}
{%- for call in message.tool_calls %}
{%- if call.id is undefined or call.id | length != 9 %}
{{- raise_exception('Tool call IDs should be alphanumeric strings with length 9!') }}{% endif %}
{%- set written = call.function | tojson -%}
{{- written[:-1] + ', "id": "' + call.id + '"}' + (']' + eos_token if loop.last else ', ') }}{% endfor %}
{%- elif message.role == 'assistant' %}{{ ' ' + message.content + eos_token }}
{%- else %}{{ raise_exception('Only user, assistant and tool roles are supported!') }}{% endif %}{% endfor %}""",
    ("[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_CALLS]", "[TOOL_RESULTS]"),
    end="</s>",
    begin="<s>",
)

# No role for the system, whose text stands in the first question; no tools; roles must alternate.
GEMMA_3 = Family(
    """{{ bos_token }}{% set first = '' %}
{%- if messages[0].role == 'system' %}{% set first = messages[0].content + '\n\n' %}{% set messages = messages[1:] %}
{%- endif %}
{%- for message in messages %}
{%- if (message.role == 'user') != (loop.index0 % 2 == 0) %}
{{- raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif -%}
{{- '<start_of_turn>' + ('model' if message.role == 'assistant' else message.role) + '\n' -}}
{{- (first if loop.first else '') + message.content | trim + '<end_of_turn>\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}""",
    ("<start_of_turn>", "<end_of_turn>"),
    end="<eos>",
    begin="<bos>",
)

# Channels: a thought before a call or the last answer, calls to functions.NAME, and another end for each.
GPT_OSS = Family(
    """{%- if messages[0].role in ('system', 'developer') %}{% set rules = messages[0].content %}
{%- set messages = messages[1:] %}{% else %}{% set rules = '' %}{% endif -%}
{{- '<|start|>system<|message|>You are ChatGPT.\nReasoning: ' + reasoning_effort | default('medium') + '<|end|>' -}}
{%- if rules or tools %}{{ '<|start|>developer<|message|># Instructions\n\n' + rules }}
{%- if tools %}{{ '\n\n# Tools\n\nnamespace functions {\n' }}
{%- for tool in tools %}{{ 'type ' + tool.function.name + ' = (_: ' }}{{ tool.function.parameters | tojson }}
{{- ') => any;\n' }}{% endfor %}{{ '}' }}{% endif %}{{ '<|end|>' }}{% endif %}
{%- set called = namespace(name='') %}
{%- for message in messages %}
{%- if message.role == 'assistant' %}
{%- if message.tool_calls %}
{%- set call = message.tool_calls[0].function %}{% set called.name = call.name %}
{%- if message.thinking %}{{ '<|start|>assistant<|channel|>analysis<|message|>' + message.thinking + '<|end|>' }}
{%- elif message.content %}{{ '<|start|>assistant<|channel|>analysis<|message|>' + message.content + '<|end|>' }}
{%- endif -%}
{{- '<|start|>assistant to=functions.' + call.name + '<|channel|>commentary json<|message|>' -}}
{{- call.arguments | tojson }}{{ '<|call|>' -}}
{%- elif loop.last and not add_generation_prompt %}
{%- if message.thinking %}{{ '<|start|>assistant<|channel|>analysis<|message|>' + message.thinking + '<|end|>' }}
{%- endif -%}
{{- '<|start|>assistant<|channel|>final<|message|>' + message.content + '<|return|>' -}}
{%- else %}{{ '<|start|>assistant<|channel|>final<|message|>' + message.content + '<|end|>' }}
{%- set called.name = '' %}{% endif %}
{%- elif message.role == 'tool' %}
{%- if not called.name %}{{ raise_exception('Message has tool role, but there was no previous assistant message') }}
{%- endif -%}
{{- '<|start|>functions.' + called.name + ' to=assistant<|channel|>commentary<|message|>' -}}
{{- message.content | tojson }}{{ '<|end|>' -}}
{%- else %}{{ '<|start|>user<|message|>' + message.content + '<|end|>' }}{% endif %}{% endfor %}
{%- if add_generation_prompt %}{{ '<|start|>assistant' }}{% endif %}""",
    ("<|start|>", "<|message|>", "<|channel|>", "<|end|>", "<|call|>"),
    end="<|return|>",
)


def bars(text: str) -> str:
    """Return a text with the wide bars and the low lines of DeepSeek's tokens."""
    return text.replace("@", "\uff5c").replace("^", "\u2581")


# The prompt opens a thought that no dialogue has. Arguments of calls must be text; tools are dropped.
DEEPSEEK_R1 = Family(
    bars("""{{ bos_token }}{% set state = namespace(after_tool=false) %}
{%- if messages[0].role == 'system' %}{{ messages[0].content }}{% set messages = messages[1:] %}{% endif %}
{%- for message in messages %}
{%- if message.role == 'user' %}{% set state.after_tool = false %}{{ '<@User@>' + message.content }}
{%- elif message.role == 'assistant' and message.tool_calls -%}
{{- ('' if state.after_tool else '<@Assistant@>') + (message.content or '') + '<@tool^calls^begin@>' -}}
{%- for call in message.tool_calls -%}
{{- '<@tool^call^begin@>' + call.type + '<@tool^sep@>' + call.function.name + '\n```json\n' -}}
{{- call.function.arguments + '\n```<@tool^call^end@>' }}{% endfor -%}
{{- '<@tool^calls^end@><@end^of^sentence@>' }}
{%- elif message.role == 'assistant' %}
{%- set content = message.content %}
{%- if '</think>' in content %}{% set content = content.split('</think>')[-1] %}{% endif -%}
{{- ('' if state.after_tool else '<@Assistant@>') + content + '<@end^of^sentence@>' }}
{%- set state.after_tool = false %}
{%- elif message.role == 'tool' -%}
{{- '<@tool^outputs^begin@><@tool^output^begin@>' + message.content + '<@tool^output^end@>' -}}
{{- '<@tool^outputs^end@>' }}{% set state.after_tool = true %}{% endif %}{% endfor %}
{%- if add_generation_prompt and not state.after_tool %}{{ '<@Assistant@><think>\n' }}{% endif %}"""),
    tuple(
        map(bars, ("<@User@>", "<@Assistant@>", "<@tool^calls^begin@>", "<@tool^calls^end@>", "<think>", "</think>"))
    ),
    end=bars("<@end^of^sentence@>"),
    begin=bars("<@begin^of^sentence@>"),
)

# A whole dialogue ends with the end of the text, which a prompt does not have. No roles for tools are known.
PHI_3 = Family(
    """{%- for message in messages %}
{%- if message.role in ('system', 'user', 'assistant') and message.content -%}
{{- '<|' + message.role + '|>\n' + message.content + '<|end|>\n' }}{% endif %}{% endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|>\n' }}{% else %}{{ eos_token }}{% endif %}""",
    ("<|system|>", "<|user|>", "<|assistant|>", "<|end|>"),
    end="<|endoftext|>",
)

# Tools and their results have roles; a list of calls stands after one mark.
GRANITE_3 = Family(
    """{%- if messages[0].role == 'system' %}{% set system = messages[0].content %}{% set messages = messages[1:] %}
{%- else %}{% set system = 'You are Granite.' + (' Think first.' if thinking else '') %}{% endif -%}
{{- '<|start_of_role|>system<|end_of_role|>' + system + '<|end_of_text|>\n' -}}
{%- if tools %}{{ '<|start_of_role|>tools<|end_of_role|>' }}{{ tools | tojson(indent=4) }}{{ '<|end_of_text|>\n' }}
{%- endif %}
{%- for message in messages %}
{%- set calls = message.tool_calls | map(attribute='function') | list if message.tool_calls else [] -%}
{{- '<|start_of_role|>' + ('tool_response' if message.role == 'tool' else message.role) + '<|end_of_role|>' -}}
{{- message.content or '' }}{% if calls %}{{ '<|tool_call|>' }}{{ calls | tojson }}{% endif -%}
{{- '<|end_of_text|>\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|start_of_role|>assistant<|end_of_role|>' }}{% endif %}""",
    ("<|start_of_role|>", "<|end_of_role|>", "<|tool_call|>"),
    end="<|end_of_text|>",
)

# Role names in plain text between line breaks; everything but text is dropped.
ZEPHYR = Family(
    """{%- for message in messages -%}
{{- '<|' + message.role + '|>\n' + message.content + eos_token + '\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}""",
    (),
    end="</s>",
)

FAMILIES = {
    "llama 3": LLAMA_3,
    "qwen 2.5": QWEN_2_5,
    "qwen 3": QWEN_3,
    "mistral": MISTRAL,
    "gemma 3": GEMMA_3,
    "gpt-oss": GPT_OSS,
    "deepseek r1": DEEPSEEK_R1,
    "phi 3": PHI_3,
    "granite 3": GRANITE_3,
    "zephyr": ZEPHYR,
}
