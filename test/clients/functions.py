# Uses every function of an adapter on real VMs as a caller with the iii-sdk of
# PyPI does. The text of MARK is in everything that must not be logged. It leaves
# no sandbox.
import asyncio
import base64
import hashlib
import json
import os
import time

from iii import InitOptions, InvocationError, register_worker
from iii.channels import ChannelReader
from iii.helpers import create_channel
from iii.iii_types import StreamChannelRef

url, image, mark = os.environ["III_URL"], os.environ["IMAGE"], os.environ["MARK"]
adapter = "sandbox-libkrun"
# This version sends telemetry to the default address, whatever url says.
client = register_worker(url, InitOptions(worker_name="python-client", otel={"enabled": False}))
called = set()


def call(leaf, payload, timeout_ms=120000):
    function_id = f"{adapter}::{leaf}"
    called.add(function_id)
    return client.trigger({"function_id": function_id, "payload": payload, "timeout_ms": timeout_ms})


def refused(code, leaf, payload):
    """Returns the error of a call that fails with the S-code: all of its message."""
    try:
        result = call(leaf, payload)
    except InvocationError as e:
        assert (e.code, e.function_id) == ("invocation_failed", f"{adapter}::{leaf}"), e
        fault = json.loads(e.message)
        assert sorted(fault) == ["code", "docs_url", "fix", "fix_note", "message", "retryable", "type"], fault
        assert fault["code"] == code and fault["docs_url"].endswith("#" + code), fault
        return fault
    raise AssertionError(f"{leaf} was to fail with {code}: {result}")


def same(got, want):
    assert got == want, f"got {got!r}, want {want!r}"


def picked(reply, *names):
    return [reply[name] for name in names]


async def upload(payload, data, text=None):
    """Writes data to a file through a channel; text goes ahead of it."""
    channel = await asyncio.to_thread(create_channel, client)
    payload = {**payload, "content": channel.reader_ref.model_dump()}
    wrote = asyncio.create_task(asyncio.to_thread(call, "fs::write", payload))
    if text:
        await channel.writer.send_message_async(text)
    if data:
        await channel.writer.write(data)
    await channel.writer.close_async()
    return await wrote


async def download(payload):
    """Reads a file through its channel."""
    reply = await asyncio.to_thread(call, "fs::read", payload)
    return reply, await ChannelReader(url, StreamChannelRef(**reply["content"])).read_all()


def lifecycle():
    # The SDK leaves a payload of None out of its message.
    info = call("adapter::info", None)
    same(picked(info, "adapter", "contract"), [adapter, {"major": 1, "minor": 1}])
    same([i["name"] for i in call("catalog::list", None)["images"]], ["python", "node", image])
    run = call("run", {"image": image, "lang": "shell", "code": 'cat; echo "$MARK" >&2; exit 3', "env": [f"MARK={mark}"],
                       "stdin": base64.b64encode(f"stdin {mark}".encode()).decode()})
    same(picked(run, "stdout", "stderr", "exit_code", "success", "timed_out"), [f"stdin {mark}", mark + "\n", 3, False, False])
    made = call("create", {"image": image, "name": "python's", "memory_mb": 256, "env": {"MARK": mark}})
    [sandbox] = call("list", {})["sandboxes"]
    same(picked(sandbox, "sandbox_id", "name", "image", "stopped"), [made["sandbox_id"], "python's", image, False])
    same(picked(refused("S100", "create", {"image": "no-such-image"}), "type", "retryable"), ["config", False])
    return made["sandbox_id"]


def programs(box):
    env = call("exec", {**box, "argv": ["sh", "-c", "echo $MARK π $B; exit 7"], "env": {"B": mark}})
    same(picked(env, "stdout", "exit_code", "success"), [f"{mark} π {mark}\n", 7, False])
    slow = refused("S200", "exec", {**box, "cmd": "sleep 100", "timeout_ms": 300})
    same(slow["type"], "execution")
    refused("S001", "exec", {**box, "cmd": "a b", "args": ["c"]})
    # The caller's own time: the program's slot is free again when it has ended.
    try:
        call("exec", {**box, "cmd": "sleep 100", "timeout_ms": 1000}, timeout_ms=200)
        raise AssertionError("it was to time out")
    except InvocationError as e:
        same(e.code, "TIMEOUT")
    while call("list", {})["sandboxes"][0]["exec_in_flight"]:
        time.sleep(0.05)


def files(box):
    text = {**box, "path": "/data/sub/text", "content": f"one {mark}\ntwo\n"}
    parent = refused("S211", "fs::write", text)
    same(parent["fix"], {"parents": True})
    same(call("fs::write", {**text, **parent["fix"]}), {"bytes_written": len(text["content"]), "path": text["path"]})
    raw = {**box, "path": "/data/raw", "content_b64": base64.b64encode(bytes(range(256))).decode()}
    same(call("fs::write", raw)["bytes_written"], 256)
    same(call("fs::mkdir", {**box, "path": "/data/dir", "mode": "0700"}), {"created": True})
    same(call("fs::chmod", {**box, "path": text["path"], "mode": "0750"}), {"updated": 1})
    same(picked(call("fs::stat", {**box, "path": text["path"]}), "mode", "is_dir"), ["0750", False])
    same(call("fs::mv", {**box, "src": text["path"], "dst": "/data/moved"}), {"moved": True})
    same(call("fs::grep", {**box, "path": "/data", "pattern": r"^t\wo$"})["matches"],
         [{"path": "/data/moved", "line": 2, "content": "two"}])
    same(call("fs::sed", {**box, "files": ["/data/moved"], "pattern": "(t)wo", "replacement": "${1}hree"})["total_replacements"], 1)
    same([e["name"] for e in call("fs::ls", {**box, "path": "/data"})["entries"]], ["dir", "moved", "raw", "sub"])
    refused("S217", "fs::grep", {**box, "path": "/data", "pattern": "("})
    same(call("fs::rm", {**box, "path": "/data/dir"}), {"removed": True})


async def transfers(box):
    reply, data = await download({**box, "path": "/data/moved"})
    same([reply["body"], data.decode()], [f"one {mark}\nthree\n"] * 2)
    reply, data = await download({**box, "path": "/data/raw"})
    same([reply.get("body"), data], [None, bytes(range(256))])
    path = "/data/big"
    # The writer of this SDK, too, connects only when it has something to send.
    same((await upload({**box, "path": path}, b"", "nothing follows"))["bytes_written"], 0)
    for size in (1, (8 << 20) + 1):
        data = os.urandom(size)
        same(await upload({**box, "path": path}, data), {"bytes_written": size, "path": path})
        inside = await asyncio.to_thread(call, "exec", {**box, "cmd": f"sha256sum {path}"})
        same(inside["stdout"].split()[0], hashlib.sha256(data).hexdigest())
        reply, back = await download({**box, "path": path})
        assert (reply["size"], back) == (size, data), f"{size} bytes came back as {len(back)}"


def step(name, work, *args):
    began = time.monotonic()
    result = asyncio.run(work(*args)) if asyncio.iscoroutinefunction(work) else work(*args)
    print(f"{name}: {(time.monotonic() - began) * 1000:.0f} ms", flush=True)
    return result


try:
    box = {"sandbox_id": step("lifecycle", lifecycle)}
    step("programs", programs, box)
    step("files", files, box)
    step("transfers", transfers, box)
    same(call("stop", {**box, "wait": True}), {**box, "stopped": True})
    refused("S002", "stop", box)
    functions = client.trigger({"function_id": "engine::functions::list", "payload": {"worker": adapter}})["functions"]
    same(sorted(called), sorted(f["function_id"] for f in functions))
    same(len(called), 17)
finally:
    client.shutdown()
