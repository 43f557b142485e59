"""From a request in Anthropic's words to a chat."""

import json
from collections.abc import Iterator
from typing import Any

from tilestack.server.prompts import plain_text
from tilestack.server.schemas import ChatRequest, CountRequest
from tilestack.server.schemas.anthropic import (
    ClientTool,
    SchemaOutput,
    TextBlock,
    ThinkingBlock,
    ToolResultBlock,
    ToolUse,
    ToolUseBlock,
    Turn,
)
from tilestack.server.schemas.chat import (
    AssistantMessage,
    CalledFunction,
    Function,
    Instruction,
    JsonSchema,
    Message,
    NamedFunction,
    SchemaFormat,
    Tool,
    ToolCall,
    ToolChoice,
    ToolMessage,
)

FIELDS = {  # by their names in a chat
    "max_completion_tokens": "max_tokens",
    "stop": "stop_sequences",
    "response_format": "output_config.format",
    "reasoning_effort": "output_config.effort",
    "continue_final_message": "messages",
}
SAME = ("model", "max_completion_tokens", "stop", "temperature", "top_p", "top_k", "stream")


def chat_of(request: CountRequest) -> ChatRequest:
    """The chat whose answer is asked for."""
    choice, form = request.tool_choice, request.output_config.format if request.output_config else None
    told = [] if request.system is None else [Instruction(role="system", content=plain_text(request.system))]
    return ChatRequest(
        **{name: getattr(request, FIELDS.get(name, name), None) for name in SAME},
        messages=[*told, *(message for turn in request.messages for message in messages_of(turn))],
        continue_final_message=request.messages[-1].role == "assistant" or None,
        tools=[tool_of(tool) for tool in request.tools] if request.tools else None,
        tool_choice=choice_of(choice) if choice else None,
        response_format=format_of(form) if form else None,
        reasoning_effort=request.output_config.effort if request.output_config else None,
        parallel_tool_calls=False if choice and choice.disable_parallel_tool_use else None,
    )


def messages_of(turn: Turn) -> Iterator[Message]:
    """A turn as messages: to a chat template, each result of a tool is a message of its own."""
    blocks = [] if isinstance(turn.content, str) else turn.content
    texts = [block for block in blocks if isinstance(block, TextBlock)]
    text = turn.content if isinstance(turn.content, str) else plain_text(texts)
    if turn.role == "assistant":
        calls = [call_of(block) for block in blocks if isinstance(block, ToolUseBlock)]
        thoughts = "".join(block.thinking for block in blocks if isinstance(block, ThinkingBlock)) or None
        said = None if calls and not text else text
        yield AssistantMessage(role="assistant", content=said, tool_calls=calls or None, reasoning_content=thoughts)
        return
    results = [block for block in blocks if isinstance(block, ToolResultBlock)]
    for result in results:
        yield ToolMessage(role="tool", content=plain_text(result.content), tool_call_id=result.tool_use_id)
    if texts or not results:
        yield Instruction(role="user", content=text)


def choice_of(choice: ToolUse) -> Any:
    if choice.name is not None:
        return ToolChoice(type="function", function=NamedFunction(name=choice.name))
    return "required" if choice.type == "any" else choice.type


def format_of(form: SchemaOutput) -> SchemaFormat:
    return SchemaFormat(type="json_schema", json_schema=JsonSchema(name="answer", schema=form.schema_))


def call_of(block: ToolUseBlock) -> ToolCall:
    called = CalledFunction(name=block.name, arguments=json.dumps(block.input))
    return ToolCall(id=block.id, type="function", function=called)


def tool_of(tool: ClientTool) -> Tool:
    function = Function(name=tool.name, description=tool.description, parameters=tool.input_schema, strict=tool.strict)
    return Tool(type="function", function=function)
