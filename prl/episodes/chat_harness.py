"""The agent program for tasks that need one: a chat loop in this process, under verifiers' own episode machinery.

The harnesses that come with verifiers start an interpreter per rollout, which downloads its dependencies at run time.
This one runs the same loop in this process: ask the model, carry out its tool calls, until it answers without one.
"""

import json
from contextlib import AsyncExitStack
from typing import Any

from openai import AsyncOpenAI
from openai.types.chat.chat_completion_message_function_tool_call import Function
from verifiers.v1.clients import ModelContext
from verifiers.v1.configs.harness import HarnessConfig
from verifiers.v1.dialects.chat import message_to_wire
from verifiers.v1.harness import Harness
from verifiers.v1.harnesses.utils.mcp import call_mcp, connect_mcp
from verifiers.v1.runtimes import ProgramResult, Runtime
from verifiers.v1.task import TaskData
from verifiers.v1.trace import Trace
from verifiers.v1.types import UserMessage


class ChatHarness(Harness[HarnessConfig]):
    """A chat loop with the task's tools (MCP servers). Model calls go through verifiers' interception server."""

    APPENDS_SYSTEM_PROMPT = True
    SUPPORTS_MCP = True
    SUPPORTS_RESUME = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(
        self,
        ctx: ModelContext,
        trace: Trace,
        runtime: Runtime,
        endpoint: str,
        secret: str,
        mcp_urls: dict[str, str],
        data: TaskData,
    ) -> ProgramResult:
        """Play one conversation; verifiers records it from the requests to `endpoint`."""
        system, prompt = self.resolve_prompt(data)
        opening = [UserMessage(content=prompt)] if isinstance(prompt, str) else list(prompt or [])
        messages = [] if system is None else [{"role": "system", "content": system}]
        messages += [message_to_wire(message) for message in opening]
        servers_config = {name: {"url": url, "timeout": self.config.tool_timeout} for name, url in mcp_urls.items()}
        async with AsyncExitStack() as stack, AsyncOpenAI(base_url=endpoint, api_key=secret, max_retries=0) as client:
            tools, dispatch, servers = await connect_mcp({"mcpServers": servers_config}, stack)
            while True:
                kwargs = {"tools": tools} if tools else {}
                reply = await client.chat.completions.create(model=ctx.model, messages=messages, **kwargs)
                message = reply.choices[0].message
                # Echoed with all fields, unknown ones included: a changed echo would break the exact prefix.
                messages.append(message.model_dump(exclude_none=True))
                if not message.tool_calls:
                    return ProgramResult(0, "", "")
                for call in message.tool_calls:
                    content = await self._call(call.function, dispatch, servers)
                    messages.append({"role": "tool", "tool_call_id": call.id, "content": content})

    async def _call(self, function: Function, dispatch: dict[str, Any], servers: dict[str, Any]) -> str | list[Any]:
        """Call a tool and return its answer; an error in the call is an answer for the model to read."""
        if function.name not in dispatch:
            return f"error: unknown tool {function.name!r}"
        try:
            arguments = json.loads(function.arguments or "{}")
        except json.JSONDecodeError as error:
            return f"error: arguments are not JSON: {error}"
        if not isinstance(arguments, dict):
            return "error: arguments must be a JSON object"
        return await call_mcp(servers, dispatch, function.name, arguments)
