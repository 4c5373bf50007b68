"""sft from sources that give no token ids: an endpoint of chat messages, and a file."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

pytestmark = pytest.mark.slow

BRIEF = (
    *("trainer.token_export=true", "orchestrator.eval.every=null", "max_steps=5"),
    *("orchestrator.group_size=1", "orchestrator.batch_size=128"),
)


class Adds(BaseHTTPRequestHandler):
    """A chat model that knows the answers of env=math, and wants a key."""

    def do_GET(self):
        self.reply({"object": "list", "data": [{"id": "adds", "object": "model"}]})

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if not self.path.endswith("/v1/chat/completions"):
            return self.reply({"error": "no such route"}, 404)
        answer = str(eval(body["messages"][-1]["content"].removesuffix("=")))
        choice = {"message": {"role": "assistant", "content": answer}, "finish_reason": "stop"}
        self.reply({"choices": [choice | {"index": index} for index in range(body.get("n") or 1)]})

    def reply(self, content, status=200):
        allowed = self.headers["Authorization"] == "Bearer s3cret"
        text = json.dumps(content).encode()
        self.send_response(status if allowed else 401)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *_):
        pass


class Patient(ThreadingHTTPServer):
    request_queue_size = 512  # with the 5 of the standard library, clients wait seconds to try again


@pytest.fixture
def endpoint(monkeypatch):
    monkeypatch.setenv("ADDS_KEY", "s3cret")
    with Patient(("127.0.0.1", 0), Adds) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/v1"
        server.shutdown()


def trained_texts(run, tokenizer, step=1):
    """The text of the tokens that feed `ce`, of each sequence."""
    return [
        tokenizer.decode([t for t, use in zip(line["token_ids"], line["use"], strict=True) if use == "ce"])
        for line in run.tokens(step)
    ]


def test_sft_from_chat_trains_in_the_policys_template(inline, endpoint, tokenizer):
    teacher = ("teacher=endpoint", "teacher.name=adds", "teacher.api_key_var=ADDS_KEY", f"teacher.base_url={endpoint}")
    run = inline("algo=sft", *teacher, *BRIEF)
    assert run.status == 0, run.stderr
    assert "samples from 'adds' by chat messages" in (run.dir / "logs" / "orchestrator.log").read_text()
    assert min(run.column("reward/all/mean")) == 1.0, "the teacher's"
    assert run.column("nll")[-1] < run.column("nll")[0] - 0.1
    texts = trained_texts(run, tokenizer)
    replies = {record["messages"][-1]["content"] for record in run.rollouts(1)}
    assert len(texts) > 100
    for text in texts:
        assert text.startswith("<think>\n\n</think>\n\n") and text.endswith("<|im_end|>")
        assert text.rpartition("\n")[2].removesuffix("<|im_end|>") in replies


def test_sft_on_demonstrations_of_a_file_asks_no_model(inline, tokenizer, tmp_path):
    path = tmp_path / "sums.jsonl"
    pairs = [(a, b) for a in range(20) for b in range(20)]
    rows = [{"q": f"{a}+{b}=", "a": a + b, "how": f"{a + b}"} for a, b in pairs]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    env = ["path=" + str(path), "prompt_key=q", "answer_key=a", "demonstration_key=how", "grader=numeric"]
    run = inline(
        "algo=sft",
        "algo.sampling.source=demonstrations",
        "env=jsonl",
        *(f"envs.jsonl.args.{setting}" for setting in env),
        *BRIEF,
    )
    assert run.status == 0, run.stderr
    assert set(run.column("reward/all/mean")) == {1.0}
    assert run.column("nll")[-1] < run.column("nll")[0] - 0.1
    answers = {f"<think>\n\n</think>\n\n{row['a']}<|im_end|>" for row in rows}
    texts = trained_texts(run, tokenizer)
    assert len(texts) > 100 and set(texts) <= answers
    assert {record["start_version"] for record in run.rollouts(5)} == {None}
    assert not list((run.dir / "logs").glob("teacher*"))
