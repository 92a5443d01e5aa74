"""A chat template and an answer of each family that writes calls of tools, as its models do.

The templates are short ones of our own: what they put around messages, and how they write calls, is
what the families' own templates do. Answers are written otherwise than the templates write them
again (white space in JSON, new lines between tags): only by its id is such a call found.
"""

from __future__ import annotations

from dataclasses import dataclass

NAME, ARGUMENTS = "{{ c['function']['name'] }}", "{{ c['function']['arguments'] | tojson }}"
EACH = "{% for k, v in c['function']['arguments'].items() %}"
BARE = (  # {city:"Oslo",days:3}, with other marks for quotes
    EACH
    + "{{ ',' if not loop.first else '' }}{{ k }}:{{ QUOTE + v + QUOTE if v is string else v }}"
    "{% endfor %}"
)
PYTHONIC = (  # with something behind each, so that several can be told apart
    "{{ '' if loop.first else ', ' }}"
    + NAME
    + "({% for k, v in c['function']['arguments'].items() %}"
    "{{ ', ' if not loop.first else '' }}{{ k }}={{ v | tojson }}{% endfor %})"
)
ASKED = '{"city":"Oslo",  "days":3}'
ALSO = '{"city":"Bergen"}'


@dataclass(frozen=True)
class Case:
    """One family. ``wrote`` is the answer, less the token that ends it."""

    user: tuple[str, str]  # what stands around messages
    tool: tuple[str, str]
    front: str
    call: str
    end: str  # the token that the model ends with
    wrote: str
    bad: str  # a call that cannot be read
    calls: tuple[str, str] = ("", "")  # around all calls
    tail: str = ""  # what the template puts behind an answer
    think: tuple[str, str] = ("", "")
    thought: str = ""
    content: str = "I look ."
    n_calls: int = 2
    last: str = "so well ."  # an answer of text
    special: str = ""  # other special tokens

    @property
    def template(self) -> str:
        """The chat template."""
        thinking = (
            "{% if m.get('reasoning_content') %}" + self.think[0] + "{{ m['reasoning_content'] }}"
            f"{self.think[1]}{{% endif %}}"
        )  # fmt: skip
        return (
            f"{{% if tools %}}{self.user[0]}tools{{% for t in tools %}}{{{{ t | tojson }}}}{{% endfor %}}"
            f"{self.user[1]}{{% endif %}}{{% for m in messages %}}"
            f"{{% if m['role'] == 'tool' %}}{self.tool[0]}{{{{ m['content'] }}}}{self.tool[1]}"
            f"{{% elif m['role'] == 'assistant' %}}{self.front}{thinking if self.think[0] else ''}"
            f"{{{{ m['content'] }}}}{{% if m.get('tool_calls') %}}{self.calls[0]}"
            f"{{% for c in m['tool_calls'] %}}{self.call}{{% endfor %}}{self.calls[1]}{{% endif %}}"
            f"{self.tail}{{% else %}}{self.user[0]}{{{{ m['content'] }}}}{self.user[1]}{{% endif %}}"
            f"{{% endfor %}}{{% if add_generation_prompt %}}{self.front}{{% endif %}}"
        )


IM = ("<|im_start|>user\n", "<|im_end|>\n")
IM_FRONT = "<|im_start|>assistant\n"
CASES = {
    "harmony": Case(
        ("<|start|>user<|message|>", "<|end|>"),
        ("<|start|>functions.get_weather to=assistant<|channel|>commentary<|message|>", "<|end|>"),
        "<|start|>assistant",
        "<|channel|>commentary to=functions." + NAME + " <|constrain|>json<|message|>" + ARGUMENTS,
        "<|call|>",
        "<|channel|>analysis<|message|>so well<|end|><|start|>assistant<|channel|>commentary"
        "<|message|>I look .<|end|><|start|>assistant<|channel|>commentary to=functions.get_weather "
        f"<|constrain|>json<|message|>{ASKED}",
        '<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{"city": }',
        tail="<|call|>",
        think=("<|channel|>analysis<|message|>", "<|end|><|start|>assistant"),
        thought="so well",
        n_calls=1,
        last="<|channel|>final<|message|>so well .",
        special="<|start|> <|message|> <|end|> <|channel|> <|constrain|> <|return|>",
    ),
    "kimi-k2": Case(
        ("<|im_user|>user<|im_middle|>", "<|im_end|>"),
        ("<|im_system|>tool<|im_middle|>", "<|im_end|>"),
        "<|im_assistant|>assistant<|im_middle|>",
        "<|tool_call_begin|>functions." + NAME + ":{{ loop.index0 }}<|tool_call_argument_begin|>"
        + ARGUMENTS + "<|tool_call_end|>",
        "<|im_end|>",
        "I look .<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0"
        f"<|tool_call_argument_begin|>{ASKED}<|tool_call_end|><|tool_call_begin|>functions."
        f"get_weather:1<|tool_call_argument_begin|>{ALSO}<|tool_call_end|><|tool_calls_section_end|>",
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0"
        '<|tool_call_argument_begin|>{"city": <|tool_call_end|>',
        calls=("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
        tail="<|im_end|>",
        special="<|im_user|> <|im_middle|> <|im_system|> <|im_assistant|> <|tool_call_begin|> "
        "<|tool_call_argument_begin|> <|tool_call_end|> <|tool_calls_section_begin|> "
        "<|tool_calls_section_end|>",
    ),
    "deepseek-v3": Case(
        ("<｜User｜>", ""),
        ("<｜tool▁output▁begin｜>", "<｜tool▁output▁end｜>"),
        "<｜Assistant｜></think>",
        "<｜tool▁call▁begin｜>" + NAME + "<｜tool▁sep｜>" + ARGUMENTS + "<｜tool▁call▁end｜>",
        "<｜end▁of▁sentence｜>",
        "I look .<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>"
        f"{ASKED}<｜tool▁call▁end｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{ALSO}"
        "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{{<｜tool▁call▁end｜>",
        calls=("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
        tail="<｜end▁of▁sentence｜>",
        special="<｜User｜> <｜Assistant｜> <｜tool▁output▁begin｜> <｜tool▁output▁end｜> "
        "<｜tool▁call▁begin｜> <｜tool▁sep｜> <｜tool▁call▁end｜> <｜tool▁calls▁begin｜> <｜tool▁calls▁end｜>",
    ),
    "glm-4.5": Case(
        ("<|user|>\n", ""),
        ("<|observation|>\n<tool_response>\n", "\n</tool_response>"),
        "<|assistant|>",
        "\n<tool_call>" + NAME + "\n" + EACH
        + "<arg_key>{{ k }}</arg_key>\n<arg_value>{{ v }}</arg_value>\n{% endfor %}</tool_call>",
        "<|observation|>",
        "\n<think>so well</think>\nI look .\n<tool_call>get_weather\n<arg_key>city</arg_key> "
        "<arg_value>Oslo</arg_value><arg_key>days</arg_key>\n<arg_value>3</arg_value>\n</tool_call>\n"
        "<tool_call>get_weather\n<arg_key>city</arg_key><arg_value>Bergen</arg_value>\n</tool_call>",
        "<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Os",
        think=("\n<think>", "</think>\n"),
        thought="so well",
        special="<|user|> <|assistant|>",
    ),
    "minimax-m2": Case(
        ("]~b]user\n", "[e~[\n"),
        ("]~b]tool\n<response>", "</response>[e~[\n"),
        "]~b]ai\n",
        '<invoke name="' + NAME + '">\n' + EACH
        + '<parameter name="{{ k }}">{{ v }}</parameter>\n{% endfor %}</invoke>\n',
        "[e~[",
        "<think>\nso well\n</think>\n\nI look .\n<minimax:tool_call>\n"
        '<invoke name="get_weather"><parameter name="city">Oslo</parameter>'
        '<parameter name="days">3</parameter></invoke>\n<invoke name="get_weather">'
        '<parameter name="city">Bergen</parameter></invoke>\n</minimax:tool_call>',
        '<minimax:tool_call>\n<invoke name="get_weather">\n<parameter name="city">Os',
        calls=("\n<minimax:tool_call>\n", "</minimax:tool_call>"),
        tail="[e~[\n",
        think=("<think>\n", "\n</think>\n\n"),
        thought="so well",
        special="]~b]",
    ),
    "qwen3-coder": Case(
        IM,
        ("<|im_start|>user\n<tool_response>\n", "\n</tool_response><|im_end|>\n"),
        IM_FRONT,
        "\n<tool_call>\n<function=" + NAME + ">\n" + EACH
        + "<parameter={{ k }}>\n{{ v }}\n</parameter>\n{% endfor %}</function>\n</tool_call>",
        "<|im_end|>",
        "<think>\nso well\n</think>\n\nI look .\n<tool_call><function=get_weather>"
        "<parameter=city>Oslo</parameter><parameter=days>\n3\n</parameter></function></tool_call>\n"
        "<tool_call>\n<function=get_weather>\n<parameter=city>Bergen</parameter></function></tool_call>",
        "<tool_call>\n<function=get_weather>\n<parameter=city>\nOs",
        tail="<|im_end|>\n",
        think=("<think>\n", "\n</think>\n\n"),
        thought="so well",
        special="<|im_start|>",
    ),
    "functiongemma": Case(
        ("<start_of_turn>user\n", "<end_of_turn>\n"),
        ("<start_function_response>response:", "<end_function_response>"),
        "<start_of_turn>model\n",
        "<start_function_call>call:" + NAME + "{{ '{' }}" + BARE.replace("QUOTE", "'<escape>'")
        + "}<end_function_call>",
        "<start_function_response>",
        "I look .<start_function_call>call:get_weather{days:3,city:<escape>Oslo<escape>}"
        "<end_function_call><start_function_call>call:get_weather{city: <escape>Bergen<escape>}"
        "<end_function_call>",
        "<start_function_call>call:get_weather{city:<escape>Os",
        special="<start_of_turn> <end_of_turn> <end_function_response> <start_function_call> "
        "<end_function_call> <escape>",
    ),
    "gemma4": Case(
        ("<|turn>user\n", "<turn|>\n"),
        ("<|tool_response>response:", "<tool_response|>"),
        "<|turn>model\n",
        "<|tool_call>call:" + NAME + "{{ '{' }}" + BARE.replace("QUOTE", "'<|\"|>'") + "}<tool_call|>",
        "<|tool_response>",
        "<|channel>thought\nso well<channel|>I look .<|tool_call>call:get_weather{days:3,city:"
        '<|"|>Oslo<|"|>}<tool_call|><|tool_call>call:get_weather{city: <|"|>Bergen<|"|>}<tool_call|>',
        '<|tool_call>call:get_weather{city:<|"|>Os',
        think=("<|channel>thought\n", "<channel|>"),
        thought="so well",
        special='<|turn> <turn|> <tool_response|> <|tool_call> <tool_call|> <|"|> <|channel> <channel|>',
    ),
    "pythonic": Case(
        ("<|header_start|>user<|header_end|>\n\n", "<|eot|>"),
        ("<|header_start|>ipython<|header_end|>\n\n", "<|eot|>"),
        "<|header_start|>assistant<|header_end|>\n\n",
        PYTHONIC,
        "<|eot|>",
        """[get_weather(city='Oslo',  days=3), get_weather(city="Bergen")]""",
        "[get_weather(city='Oslo', days=3",
        calls=("[", "]"),
        tail="<|eot|>",
        content="",
        special="<|header_start|> <|header_end|> <|eom|> <|python_start|> <|python_end|>",
    ),
    "lfm2": Case(
        IM,
        ("<|im_start|>tool\n", "<|im_end|>\n"),
        IM_FRONT,
        PYTHONIC,
        "<|im_end|>",
        """I look .<|tool_call_start|>[get_weather(city="Oslo",days=3),get_weather(city="Bergen")]"""
        "<|tool_call_end|>",
        "<|tool_call_start|>[get_weather(open('x'))]<|tool_call_end|>",
        calls=("<|tool_call_start|>[", "]<|tool_call_end|>"),
        tail="<|im_end|>\n",
        special="<|im_start|> <|tool_call_start|> <|tool_call_end|>",
    ),
    "olmo3": Case(
        (IM[0], f"<functions></functions>{IM[1]}"),
        ("<|im_start|>environment\n", "<|im_end|>\n"),
        IM_FRONT,
        PYTHONIC,
        "<|im_end|>",
        """I look .<function_calls>\nget_weather(days=3, city="Oslo")\nget_weather(city='Bergen')\n"""
        "</function_calls>",
        "<function_calls>get_weather(city=__import__('os'))</function_calls>",
        calls=("<function_calls>", "</function_calls>"),
        tail="<|im_end|>\n",
        special="<|im_start|>",
    ),
    "llama3-json": Case(
        ("<|start_header_id|>user<|end_header_id|>\n\n", "<|eot_id|>"),
        ("<|start_header_id|>ipython<|end_header_id|>\n\n", "<|eot_id|>"),
        "<|start_header_id|>assistant<|end_header_id|>\n\n",
        '{"name": "' + NAME + '", "parameters": ' + ARGUMENTS + "}",
        "<|eot_id|>",
        f'{{"name":"get_weather","parameters":{ASKED}}}',
        '{"name": "get_weather", "parameters": {"city": ',
        tail="<|eot_id|>",
        content="",
        n_calls=1,
        special="<|start_header_id|> <|end_header_id|> <|eom_id|> <|python_tag|>",
    ),
    "mistral-args": Case(
        ("[INST]", "[/INST]"),
        ("[TOOL_RESULTS]", "[/TOOL_RESULTS]"),
        "",
        "[TOOL_CALLS]" + NAME + "[ARGS]" + ARGUMENTS,
        "</s>",
        f"I look .[TOOL_CALLS]get_weather[ARGS]{ASKED}[TOOL_CALLS]get_weather[ARGS]{ALSO}",
        '[TOOL_CALLS]get_weather[ARGS]{"city": ',
        tail="</s>",
        special="[INST] [/INST] [TOOL_RESULTS] [/TOOL_RESULTS] [TOOL_CALLS] [ARGS]",
    ),
    "mistral": Case(
        ("[INST] ", "[/INST]"),
        ("[TOOL_RESULTS] ", "[/TOOL_RESULTS]"),
        "",
        "{{ ', ' if not loop.first else '' }}{\"name\": \"" + NAME + '", "arguments": ' + ARGUMENTS
        + ', "id": "{{ c[\'id\'] }}"}',
        "</s>",
        f'[TOOL_CALLS] [{{"name":"get_weather","arguments":{ASKED}}},'
        f'{{"name":"get_weather","arguments":{ALSO}}}]',
        '[TOOL_CALLS] [{"name": "get_weather", "arguments": {"city": ',
        calls=("[TOOL_CALLS] [", "]"),
        tail="</s>",
        content="",
        special="[INST] [/INST] [TOOL_RESULTS] [/TOOL_RESULTS] [TOOL_CALLS]",
    ),
}  # fmt: skip
