"""Tasks that prl leaves to verifiers' harness: which tasks need it, its env, its way to the model, and the program it
runs.

With the harness, tools, hooks on a runtime and several agents work as verifiers defines them: a program plays the task,
and reaches the model through verifiers' token-in/token-out client, so that traces carry the exact tokens. That is
slower than asking the engine directly, and used only for tasks that need it (`reason_for_harness`).

The programs that come with verifiers start an interpreter per rollout, which downloads its dependencies at run time.
`ChatHarness` runs the same loop in this process: ask the model, carry out its tool calls, until it answers without one.
"""

import inspect
import json
from collections.abc import Collection
from contextlib import AsyncExitStack
from typing import Any

import verifiers.v1 as vf
from openai import AsyncOpenAI
from openai.types.chat.chat_completion_message_function_tool_call import Function
from pydantic import SecretStr
from verifiers.v1.configs.agent import agent_config_fields
from verifiers.v1.dialects.chat import message_to_wire
from verifiers.v1.harnesses.utils.mcp import call_mcp, connect_mcp
from verifiers.v1.session import hook_boundary
from verifiers.v1.utils.decorators import discover_decorated

from prl.base.errors import UNREADABLE, ConfigError
from prl.engines.chat import MessageSource
from prl.engines.sampler import Sampler
from prl.engines.template import TemplateRenderer
from prl.envs._verifiers_internals import TokenClientConfig
from prl.envs.turn import opening_messages


def reason_for_harness(taskset: vf.Taskset, task: vf.Task, exports: Collection[type] = ()) -> str | None:
    """Return why a task of this taskset needs verifiers' harness; None if it can be played in this process.

    `exports` are the classes that its module exports.
    """
    toolsets = [*taskset.toolsets(taskset.config), *task.toolsets(task.config)]
    readers = runtime_readers(task)
    changed = [hook for hook in ("setup", "finalize") if getattr(type(task), hook) is not getattr(vf.Task, hook)]
    guards = [hook.__name__ for hook in discover_decorated(task, "intercept")]
    guards += [stop.__name__ for stop in task.hooks("stop") if hook_boundary(stop, allow_trace=True) is not vf.Trace]
    own = [cls.__name__ for cls in exports if issubclass(cls, vf.Harness)]
    led = any(issubclass(cls, vf.Env) for cls in exports)
    spawned = [toolset for toolset in toolsets if not getattr(toolset, "IN_PROCESS", False)]
    reasons = [
        (spawned, "its tasks call tools that run in processes of their own"),
        (task.NEEDS_CONTAINER, "its tasks need a container"),
        (changed, f"its tasks have a {' and a '.join(changed)} hook that works on a runtime"),
        (readers, f"{', '.join(readers)} reads a runtime"),
        (task.plugged_judges(), "it has judges"),
        (guards, f"{', '.join(guards)} reads requests or replies on their way"),
        (own, f"its module has a harness of its own, {', '.join(own)}"),
        (task.data.prompt is None and not led, "its tasks have no prompt: a simulated user opens the conversation"),
    ]
    return next((reason for holds, reason in reasons if holds), None)


def runtime_readers(task: vf.Task) -> list[str]:
    """Return the names of the metrics and rewards that cannot do without a runtime."""
    signals = [*task.hooks("reward"), *task.hooks("metric")]
    runtimes = [(signal.__name__, inspect.signature(signal).parameters.get("runtime")) for signal in signals]
    return [name for name, runtime in runtimes if runtime is not None and runtime.default is inspect.Parameter.empty]


def load_harness_env(taskset: str, args: dict[str, Any], where: str, reason: str) -> vf.Env:
    """Load the verifiers env of an installed taskset: its own, else one agent that plays it with prl's chat harness.

    Raises ConfigError, with the env's config key `where` and the `reason` for the harness, if it cannot be loaded.
    """
    if "." in taskset:
        raise ConfigError(
            f"{where}.taskset={taskset!r}: {reason}, which needs verifiers' own Env, and that finds a taskset "
            "by the name of a top-level module only: install it as one and give its id"
        )
    agent: dict[str, Any] = {"runtime": {"type": "subprocess"}}
    try:
        if vf.default_harness_id(taskset) == "bash":  # verifiers' fallback; a taskset's own harness is kept
            agent["harness"] = {"id": "prl"}
        cls = vf.env_config_type(taskset)
        agents = dict.fromkeys(agent_config_fields(cls()), agent)
        return vf.load_environment(cls.model_validate({"taskset": {"id": taskset, **args}, **agents}))
    except (ValueError, TypeError) as error:
        raise ConfigError(f"{where}.taskset={taskset!r}: {error}") from error


def harness_context(sampler: Sampler, key: str) -> vf.ModelContext:
    """Describe the sampler's model to verifiers' client, which needs a server with `/inference/v1/generate`.

    Cache entries of the policy carry the version that the episode starts from.

    Args:
        sampler: Whose model, renderer and sampling parameters the episode uses.
        key: Name of the episode among the requests of a run.
    """
    pool = sampler.pool
    if isinstance(pool, MessageSource):
        raise ConfigError(
            f"{pool.model} answers with messages, and this env is played by verifiers' harness, which exchanges token "
            "ids: sample from the policy, or from a server of the policy's tokenizer (python -m prl.serve)"
        )
    if pool.http is None:
        raise ConfigError(
            f"{pool.model} runs in this process, and this env is played by verifiers' harness, which asks a server"
        )
    sampling, salt, renderer, token = sampler.parameters(key), pool.cache_salt, sampler.renderer, pool.http.token
    url = pool.http.address(sampling["seed"])
    return vf.ModelContext(
        model=pool.model,
        client=TokenClientConfig(
            base_url=f"{url}/v1",
            api_key_var="PRL_NO_KEY",  # unset: the default reads a vendor's CLI configuration, and the token is a value
            token=None if token is None else SecretStr(token),
            renderer=renderer.importable_config() if isinstance(renderer, TemplateRenderer) else renderer.config,
            renderer_model_name=sampler.tokenizer_path,
        ),
        sampling=vf.SamplingConfig.model_validate(sampling | ({"cache_salt": salt} if salt is not None else {})),
    )


class ChatHarness(vf.Harness[vf.HarnessConfig]):
    """A chat loop with the task's tools (MCP servers). Model calls go through verifiers' interception server."""

    APPENDS_SYSTEM_PROMPT = True
    SUPPORTS_MCP = True
    SUPPORTS_RESUME = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(
        self,
        ctx: vf.ModelContext,
        trace: vf.Trace,
        runtime: vf.Runtime,
        endpoint: str,
        secret: str,
        mcp_urls: dict[str, str],
        data: vf.TaskData,
    ) -> vf.ProgramResult:
        """Play one conversation; verifiers records it from the requests to `endpoint`."""
        messages = [message_to_wire(message) for message in opening_messages(data)]
        mcp = {name: {"url": url, "timeout": self.config.tool_timeout} for name, url in mcp_urls.items()}
        async with AsyncExitStack() as stack, AsyncOpenAI(base_url=endpoint, api_key=secret, max_retries=0) as client:
            tools, dispatch, servers = await connect_mcp({"mcpServers": mcp}, stack)
            while True:
                offered = {"tools": tools} if tools else {}
                reply = await client.chat.completions.create(model=ctx.model, messages=messages, **offered)
                message = reply.choices[0].message
                # Echoed with all fields, unknown ones included: a changed echo would break the exact prefix.
                messages.append(message.model_dump(exclude_none=True))
                if not message.tool_calls:
                    return vf.ProgramResult(0, "", "")
                for call in message.tool_calls:
                    content = await self._call(call.function, dispatch, servers)
                    messages.append({"role": "tool", "tool_call_id": call.id, "content": content})

    async def _call(self, function: Function, dispatch: dict[str, Any], servers: dict[str, Any]) -> str | list[Any]:
        """Call a tool and return its answer; an error in the call is an answer for the model to read."""
        if function.name not in dispatch:
            return f"error: unknown tool {function.name!r}"
        try:
            arguments = json.loads(function.arguments or "{}")
        except UNREADABLE as error:
            return f"error: arguments are not JSON: {error}"
        if not isinstance(arguments, dict):
            return "error: arguments must be a JSON object"
        return await call_mcp(servers, dispatch, function.name, arguments)
