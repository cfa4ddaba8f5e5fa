# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
# ---

# %% name="numbers" build=true
import heterolab as hl
from heterolab.lab import disk_logger
from heterolab.models.encoder import FORWARD_LAUNCHES, IMAGES_LAUNCHES
from heterolab.trace import metrics
from heterolab.workload import questions

dev, enc = hl.open_device(DEVICE), hl.models.encoder()
texts = questions()[:32]
load = hl.closed_loop(n=128, in_flight=128, texts=texts)


def go(on=dev, load=load, **settings):
    return hl.Pipeline(enc, **{"batch": 32, **settings}).run(load, on=on)


def busy(run):
    return f"{100 * metrics.busy_ns(run.trace, 'gpu') / run.trace.wall_ns:.0f} %"


def idle(run):
    return f"{100 * metrics.idle_ns(run.trace, 'gpu') / run.trace.wall_ns:.0f} %"


def a_pass(run, lane):
    """Milliseconds of a forward pass: of the host's launch calls, or of the GPU's work."""
    spans = run.trace.where((run.trace["lane"] == lane) & (run.trace["kind"] != "cpu"))
    passes = run.trace.kind("kernel")
    ops = passes["op"][passes["name"] == "encoder.forward"]
    mine = [op in set(ops.tolist()) for op in spans["op"].tolist()]
    return f"{sum((spans['end_ns'] - spans['start_ns'])[mine]) / len(set(ops.tolist())) / 1e6:.1f} ms"


per_s = metrics.throughput_per_s
first = go(batch=8, chunk=32)
better = go(batch=32, chunk=32)
large = {"batch": 64, "chunk": 64}
ids = {memory: per_s(go(**large, memory=memory)) for memory in ("pageable", "pinned")}
floats = {memory: per_s(go(**large, memory=memory, payload="images_float32")) for memory in ids}
bytes_ = per_s(go(**large, memory="pageable", payload="images_uint8"))
logits = {memory: per_s(go(**large, memory=memory, returns="logits")) for memory in ids}
jobs = {chunk: per_s(go(payload="images_uint8", chunk=chunk)) for chunk in (1, 32)}
logging = go(chunk=32, hooks=[disk_logger()])
long = [" ".join(questions()[i : i + 4]) for i in range(0, 128, 4)]
many = hl.closed_loop(n=256, in_flight=256, texts=long)
gpus = {
    name: go(hl.open_device(f"sim:{name}", values=False), many, batch=32, chunk=32, streams=1)
    for name in ("t4", "a100", "h200")
}
cost = {name: metrics.balance_card(run).gpu_ms for name, run in gpus.items()}
numbers = {
    "first_idle": idle(first),
    "better_idle": idle(better),
    "batch_gain": f"{per_s(better) / per_s(first):.1f}",
    "launches": f"{FORWARD_LAUNCHES}",
    "image_launches": f"{IMAGES_LAUNCHES}",
    "host_8": a_pass(first, "host"),
    "host_32": a_pass(better, "host"),
    "gpu_8": a_pass(first, "gpu"),
    "gpu_32": a_pass(better, "gpu"),
    "chunk_gain": f"{jobs[32] / jobs[1]:.1f}",
    "log_loss": f"{per_s(better) / per_s(logging):.1f}",
    "ids_gain": f"{100 * (ids['pinned'] / ids['pageable'] - 1):.1f} %",
    "float_gain": f"{floats['pinned'] / floats['pageable']:.2f}",
    "byte_gain": f"{bytes_ / floats['pageable']:.2f}",
    "logits_gain": f"{logits['pinned'] / logits['pageable']:.2f}",
    "topk_gain": f"{ids['pageable'] / logits['pageable']:.2f}",
    "gpu_faster": f"{cost['t4'] / cost['h200']:.1f}",
    "per_s_faster": f"{per_s(gpus['h200']) / per_s(gpus['t4']):.1f}",
    "last_faster": f"{cost['a100'] / cost['h200']:.1f}",
    "last_per_s": f"{per_s(gpus['h200']) / per_s(gpus['a100']):.1f}",
    "t4_idle": idle(gpus["t4"]),
    "h200_idle": idle(gpus["h200"]),
}
provenance = f"{first.stamp}; {gpus['t4'].stamp}; {gpus['a100'].stamp}"

# %% [markdown] name="title"
# # 05 · The whole pipeline
#
# After this lab you can
#
# * say which step keeps the GPU idle, and prove it with a hook of your own;
# * move the limit of a service with two changes, and say where it went;
# * predict what a faster GPU buys.
#
# It takes about 40 minutes. You need lab 03's words: stream, lane, overlap, bound. You need no GPU.

# %% [markdown] name="question" part="core" minutes=2
# ## The question
#
# A service answers short questions. A request passes five **stages**:
#
# 1. *preprocess* (CPU): parse it, check its key, clean the text, make token ids;
# 2. *batch* (CPU): put requests together;
# 3. *transfer* (link): copy the batch to the GPU, and later its result back;
# 4. *kernels* (GPU): a language model turns each text into a vector and finds the nearest known question;
# 5. *postprocess* (CPU): make the answer, write the session.
#
# The bill says: the GPU is the dearest part. The monitor says: it is idle for much of the time.
#
# **What keeps it idle, and would a faster GPU help?**

# %% name="open"
import heterolab as hl
from heterolab import lab
from heterolab.workload import questions

dev = hl.open_device()
enc = hl.models.encoder()
load = hl.closed_loop(n=128, in_flight=128, texts=questions()[:32])
dev

# %% name="pipeline"
pipe = hl.Pipeline(enc, batch=8, streams=2, memory="pinned", workers=1, chunk=32)
pipe

# %% [markdown] name="predict-1-text" part="core" minutes=2
# ## Predict
#
# `chunk=32`: a worker thread prepares 32 texts at a time. `batch=8`: the GPU gets 8 at a time.
# All 128 requests are there from the start. Which lane will be the busiest: `"cpu"`, `"link"` or `"gpu"`?

# %% name="predict-1"
### BEGIN SOLUTION
guess, why = "cpu", "a forward pass is hundreds of kernels, and the host launches each."
### STUDENT
# guess, why = ..., "…"
### END SOLUTION
lab.predict("busiest lane", guess, because=why)

# %% [markdown] name="run-text" part="core" minutes=4
# ## Run and look
#
# Real questions, real answers, and a trace of all that happened.

# %% name="run"
run = pipe.run(load, on=dev)
run

# %% name="answers"
lab.Table(["question", "answer"], [(a.question, a.answer) for a in run.answers[:4]])

# %% name="look"
lab.show(run, "batch=8")

# %% name="reveal-1"
lab.reveal("busiest lane", hl.metrics.balance_card(run).limits)

# %% name="causes"
lab.idle_causes(run)

# %% [markdown] name="streams-text"
# Lab 03's remedy was more streams. Here it is.

# %% name="streams"
runs = {n: hl.Pipeline(enc, batch=8, chunk=32, streams=n).run(load, on=dev) for n in (1, 2, 4, 8)}
lab.beside(runs, "streams")

# %% [markdown] name="explain-1"
# ## Explain
#
# On the simulated H200 the GPU is idle for {{first_idle}} of the time, whatever the streams.
# Streams let *copies* and *kernels* overlap, and neither of them is what the GPU waits for.
# It waits for the host thread, which sits inside launch calls.
# A forward pass is {{launches}} small kernels, and Python launches each of them.
#
# | a forward pass of | the host launches for | the GPU works for |
# | --- | --- | --- |
# | 8 texts | {{host_8}} | {{gpu_8}} |
# | 32 texts | {{host_32}} | {{gpu_32}} |
#
# The launches cost about the same whatever the batch. So a larger batch is fewer launches a request.
#
# **Throughput** is the number of requests answered in a second.
# The **bottleneck** is the lane that limits it: throughput is the least that any lane can pass on.
# Work on another lane changes nothing.
#
# Where the host launches too slowly, the simulator draws a pass as a few pulses.
# They show how much of it the GPU idles, not when.
# On a real GPU every kernel has a span of its own, where CUPTI works: `print(dev)` says so.
# Else events see a pass as one span, first kernel to last, and "at work" includes waiting for launches.

# %% [markdown] name="turn-text" part="core" minutes=4
# ## Turn three knobs
#
# Raise the throughput. `chunk` is the number of texts in a preprocessing job.
# Watch *GPU at work* and the *busiest lane*: does the lane ever change?

# %% name="panel"
knobs = {"batch": [1, 8, 32, 64], "streams": [1, 2, 4, 8], "chunk": [8, 32, 64]}
hl.pipeline_panel(enc, load, on=dev, knobs=knobs, batch=8, streams=2, chunk=32)

# %% [markdown] name="card-text"
# With 32 requests a batch it is {{batch_gain}} times as fast. The three figures per request are its
# **balance card**: milliseconds of CPU, link and GPU that one request costs.
# The ratio of the three says what to buy, and what to leave alone.
#
# The GPU is still idle for {{better_idle}} of the time. A larger batch helps further, but it must first fill.
# Lab 09b removes the cause: a CUDA graph launches the whole pass in one call.

# %% name="card"
better = hl.Pipeline(enc, batch=32, chunk=32).run(load, on=dev)
lab.beside({"batch=8": run, "batch=32": better})

# %% [markdown] name="follow-text"
# Follow one request. Most of its time it does not travel: it waits.

# %% name="follow"
lab.one_request(better, 70)

# %% name="follow-look"
batch = better.timings[70].batch
spans = better.trace.where(better.trace["batch"] == batch)
lab.show(spans, f"the batch of request 70, number {batch}")

# %% [markdown] name="payload-text" part="core" minutes=4
# ## What crosses the link
#
# The **payload** is what is sent for a request, and what comes back.
# Token ids are a few hundred bytes. A picture as float32 numbers is a thousand times as much.
# Before you run it: for which of the two does pinned memory help?

# %% name="payload"
runs = {}
for payload in ("ids", "images_uint8", "images_float32"):
    for memory in ("pageable", "pinned"):
        pipe = hl.Pipeline(enc, batch=64, chunk=64, payload=payload, memory=memory)
        runs[payload, memory] = pipe.run(load, on=dev)
lab.beside(runs, "payload")

# %% [markdown] name="payload-explain"
# * Token ids: pinning gains {{ids_gain}}. Nobody will notice.
# * Float pictures: pinning gains × {{float_gain}}, since the copy no longer holds the host.
# * The same pictures as bytes, from *pageable* memory: × {{byte_gain}}. A quarter of the bytes beats pinning.
#
# Now the way back. Logits are one number for each word of a vocabulary.
# The alternative is to pick the best three on the GPU and send only those.

# %% name="returns"
runs = {}
for returns in ("logits", "topk"):
    for memory in ("pageable", "pinned"):
        pipe = hl.Pipeline(enc, batch=64, chunk=64, returns=returns, memory=memory)
        runs[returns, memory] = pipe.run(load, on=dev)
lab.beside(runs, "returns")

# %% [markdown] name="returns-explain"
# Pinning gains × {{logits_gain}} for logits. Not sending them gains × {{topk_gain}}, from pageable memory.
# Neither is much, since the launches take most of the host's time. Compare the link's milliseconds.
# An article says that the CPU makes the answers. The work belongs where the *bytes* are.

# %% [markdown] name="jobs-text" part="core" minutes=2
# ## Few launches, many jobs
#
# The forward pass of pictures is {{image_launches}} launches, not {{launches}}. What limits now?
# With `chunk=1` each text is a preprocessing job of its own.

# %% name="jobs"
runs = {}
for chunk in (1, 8, 32):
    runs[chunk] = hl.Pipeline(enc, batch=32, chunk=chunk, payload="images_uint8").run(load, on=dev)
lab.beside(runs, "chunk")

# %% name="jobs-causes"
lab.idle_causes(runs[1])

# %% [markdown] name="jobs-explain"
# The GPU waits for the CPU again, but for other work: every job costs the host thread and the worker.
# With 32 texts a job it is {{chunk_gain}} times as fast. Find the cause before you choose the knob.

# %% [markdown] name="buy-text" part="core" minutes=5
# ## Buy a faster GPU
#
# Longer texts now, so that the GPU has real work: 256 requests, batches of 32.
# Three simulated GPUs, from old to new. (`values=False`: this counts time only, so no answers are shown.)
#
# Predict: the H200 needs {{gpu_faster}} times less GPU time for a request than the T4.
# How many times higher will the throughput be?

# %% name="predict-2"
### BEGIN SOLUTION
guess, why = 2, "the GPU gets faster, and the CPU does not."
### STUDENT
# guess, why = ..., "…"
### END SOLUTION
lab.predict("faster GPU", guess, because=why)

# %% name="buy"
long = [" ".join(questions()[i : i + 4]) for i in range(0, 128, 4)]
many = hl.closed_loop(n=256, in_flight=256, texts=long)
bought = {}
for name in ("t4", "a100", "h200"):
    gpu = hl.open_device(f"sim:{name}", values=False)
    bought[name] = hl.Pipeline(enc, batch=32, chunk=32, streams=1).run(many, on=gpu)
lab.beside(bought, "GPU")

# %% name="reveal-2"
throughput = {name: hl.metrics.throughput_per_s(bought[name]) for name in bought}
lab.reveal("faster GPU", throughput["h200"] / throughput["t4"])

# %% name="look-buy"
lab.show([bought["t4"], bought["h200"]], "the same requests on a T4 and on an H200")

# %% [markdown] name="explain-2"
# GPU time per request falls by {{gpu_faster}}, and throughput rises by {{per_s_faster}}.
# The last step shows it best. From A100 to H200 the GPU is {{last_faster}} times as fast, and the
# service × {{last_per_s}}. The idle share grew from {{t4_idle}} to {{h200_idle}}.
# The bottleneck has moved to the CPU, and no GPU will move it back.

# %% [markdown] name="hook-text" part="core" minutes=3
# ## A hook, and how it can hurt
#
# A **hook** is a function of yours. The pipeline calls it as a stage begins and as it ends.
# This one writes a line to disk for each request, and each time waits until the disk has it.

# %% name="hook"
from heterolab.lab import disk_logger

logging = hl.Pipeline(enc, batch=32, chunk=32, hooks=[disk_logger()]).run(load, on=dev)
lab.beside({"without": better, "with the log": logging})

# %% [markdown] name="hook-explain"
# The host thread runs the hook, and it is the lane that limits. While it waits for the disk it
# launches nothing: without the log, {{log_loss}} times as many requests are served. Find it in the picture.

# %% name="hook-look"
lab.show(logging, "with the log")

# %% [markdown] name="not-text" part="core" minutes=2
# ## Where it does not help
#
# Float pictures from pageable memory: the host limits. Here are three changes to other lanes.

# %% name="not"
start = dict(payload="images_float32", memory="pageable", batch=32, chunk=32, streams=1)
runs = {"as it is": hl.Pipeline(enc, **start).run(load, on=dev)}
for name, value in (("streams", 4), ("batch", 64), ("chunk", 64)):
    runs[name, value] = hl.Pipeline(enc, **start | {name: value}).run(load, on=dev)
lab.beside(runs, "changed")

# %% [markdown] name="not-why"
# None of them touches the bottleneck, so none of them helps. Tuning the wrong stage costs only time: yours.

# %% [markdown] name="exercise-1-text" part="core" minutes=5
# ## Exercise 1 · Why is the GPU idle?
#
# Write a hook that adds up, by stage, the time in which the GPU has nothing to do.
#
# * An event has `stage`, `phase` (`"begin"` or `"end"`) and `now_ns`.
# * `self.open` holds the stages that have begun and not ended, in order.
# * The time since the last event counts only if no `"kernels"` is open.
#   It goes to the stage that began last, or to `"waiting"` if none is open.
#
# A hook sees `"kernels"` begin as the host begins to launch, so it cannot see the wait for launches.
# That is why you try it on pictures, whose forward pass is a few launches.


# %% name="exercise-1"
class IdleByStage:
    def __init__(self):
        self.idle, self.open, self.last_ns = {}, [], 0

    def __call__(self, event):
        ### BEGIN SOLUTION
        if "kernels" not in self.open:
            stage = self.open[-1] if self.open else "waiting"
            self.idle[stage] = self.idle.get(stage, 0) + event.now_ns - self.last_ns
        ### END SOLUTION
        if event.phase == "begin":
            self.open.append(event.stage)
        else:
            self.open.remove(event.stage)
        self.last_ns = event.now_ns


IdleByStage().idle

# %% name="exercise-1-look"
hook = IdleByStage()
hl.Pipeline(enc, payload="images_uint8", batch=32, chunk=1, hooks=[hook]).run(load, on=dev)
lab.Table(["stage", "idle ms"], [(stage, ns / 1e6) for stage, ns in hook.idle.items()])

# %% name="check-1"
lab.check("05-1", IdleByStage, on=dev)

# %% [markdown] name="exercise-2-text" part="core" minutes=5
# ## Exercise 2 · Move the bottleneck
#
# The pipeline of *Where it does not help* once more, with `chunk=16`. Change at most two of its knobs.
#
# * The knobs are `payload`, `memory`, `batch`, `streams` and `chunk`.
# * Every request gets the same answer as before.
# * Another lane limits, and the throughput is at least 0.8 of the best that two changes can give.

# %% name="exercise-2"
### BEGIN SOLUTION
changes = dict(payload="images_uint8", memory="pinned")
### STUDENT
# changes = dict()
### END SOLUTION
start = dict(payload="images_float32", memory="pageable", batch=32, chunk=16, streams=1)
before, moved = (hl.Pipeline(enc, **start | new).run(load, on=dev) for new in ({}, changes))
lab.beside({"before": before, "after": moved})

# %% name="check-2"
lab.check("05-2", changes, on=dev)

# %% [markdown] name="decide-text" part="core" minutes=2
# ## Decide
#
# Your service is at its limit and the GPU is half idle. What do you do first, and what do you not buy?

# %% name="decide"
### BEGIN SOLUTION
decision = "Find the bottleneck; launch less and send less a request; buy no GPU while the CPU limits."
### STUDENT
# decision = "…"
### END SOLUTION
lab.decide("05", decision, better)

# %% [markdown] name="real-text" part="stretch" minutes=3
# ## On a real GPU
#
# A recording of the pipeline with batches of 32, beside what ran here. Which lane differs most?

# %% name="real"
lab.replay("05-ids-pinned", "batches of 32: here, and recorded", beside=better.trace)

# %% [markdown] name="home-text" part="home" minutes=20
# ## At home
#
# * Serve your own questions: `hl.closed_loop(n=64, in_flight=64, texts=[...])`.
# * Open `dev = hl.open_device("cpu")` and run all: everything is measured on your own machine.
# * Serve pictures with two workers instead of larger jobs. Why is that worth less?
#
# Read on: G. Amdahl's paper of 1967 (four pages); J. Mohan and others, *Analyzing and Mitigating
# Data Stalls in DNN Training*, 2021.
#
# *The numbers in this text: {{provenance}}.*
