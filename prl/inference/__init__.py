"""The policy's vLLM server and the client pool that talks to it."""
