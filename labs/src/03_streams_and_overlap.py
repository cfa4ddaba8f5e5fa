# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
# ---

# %% name="numbers" build=true
import heterolab as hl
from heterolab.lab import streams
from heterolab.pipeline.kernels import empty, rounds

dev = hl.open_device(DEVICE)
run = {}
for memory in ("pageable", "pinned"):
    for count in (1, 2):
        run[memory, count] = streams.timed(
            dev, streams.two_tasks, streams.pairs(dev, memory), streams.queues(dev, count)
        )
seed = run["pinned", 1]
k = streams.balanced_rounds(dev)
job = streams.job(dev, rounds(k))
one = streams.timed(dev, streams.serial, job)


def gain(work, chunks, count, base=None):
    alone = base or streams.timed(dev, streams.serial, work)
    return (
        alone.wall_ns
        / streams.timed(dev, streams.in_chunks, work, chunks, streams.queues(dev, count)).wall_ns
    )


numbers = {
    "mib": streams.job_mib(dev),
    "pin_gain": f"{run['pageable', 1].wall_ns / seed.wall_ns:.1f}",
    "stream_gain": f"{seed.wall_ns / run['pinned', 2].wall_ns:.2f}",
    "copy_us": f"{streams.lane_ns(seed)['h2d'] / 2e3:.0f}",
    "add_us": f"{streams.lane_ns(seed)['gpu'] / 2e3:.0f}",
    "copy_per_add": f"{streams.lane_ns(seed)['h2d'] / streams.lane_ns(seed)['gpu']:.0f}",
    "k": k,
    "gain_4": f"{gain(job, 4, 4, one):.2f}",
    "gain_16": f"{gain(job, 16, 4, one):.2f}",
    "gain_256": f"{gain(job, 256, 4, one):.2f}",
    "two_best": f"{max(gain(job, n, 2, one) for n in (4, 8, 16)):.2f}",
    "bound_4": f"{streams.speed_up_bound(4):.2f}",
    "bound_16": f"{streams.speed_up_bound(16):.2f}",
    "heavy_gain": f"{gain(job.with_kernel(rounds(10 * k)), 8, 4):.2f}",
    "pageable_gain": f"{gain(streams.job(dev, rounds(k), 'pageable'), 8, 4, one):.2f}",
    "empty_gain": f"{gain(job.with_kernel(empty()), 8, 4):.2f}",
}
provenance = one.stamp

# %% [markdown] name="title"
# # 03 · Streams and overlap
#
# After this lab you can
#
# * cut a copy–compute–copy job into parts that run side by side, up to a limit that you state;
# * say from a picture which lanes work at the same time;
# * repair a program that should overlap and does not.
#
# It takes about 35 minutes. You need NumPy and loops. You need no GPU.

# %% [markdown] name="question" part="core" minutes=2
# ## The question
#
# A service sends each batch to the GPU, computes, and fetches the result.
# The GPU waits while data is on its way, and the link waits while the GPU computes.
# An article on such services shows a program with two streams.
# It promises: "while you send new data to the GPU, it works on the old; nothing blocks".
#
# A **stream** is a queue of work for the GPU. One stream runs its work in order.
# Two streams need not wait for each other.
#
# **So how much faster does the second stream make that program?**

# %% name="open"
import heterolab as hl
from heterolab import lab
from heterolab.lab import streams
from heterolab.pipeline.kernels import empty, rounds, vector_add

dev = hl.open_device()
dev

# %% [markdown] name="article"
# ## The article's program
#
# Two tasks. Each copies an array of {{mib}} MiB to the GPU and adds another one to it.
# *Pinned* host memory is memory that the GPU's copy engine can read by itself.
# *Pageable* memory is the ordinary kind.


# %% name="two-tasks"
queues = dev.streams(8)


def two_tasks(dev, tasks, queues):
    """The article's program: copy and add, twice."""
    for i, task in enumerate(tasks):
        queue = queues[i % len(queues)]
        queue.copy(task.d_a, task.h_a)
        queue.launch(vector_add(), reads=[task.d_a, task.d_b], writes=[task.d_c])
    dev.synchronize()


queues[:2]

# %% [markdown] name="predict-1-text" part="core" minutes=2
# ## Predict
#
# How many times faster is the program with two streams than with one, in pinned memory?
# Replace `...` with a number (1.0 means no gain) and give a reason. It is locked when you run it.

# %% name="predict-1"
### BEGIN SOLUTION
guess, why = 1.05, "one copy has to wait for the other."
### STUDENT
# guess, why = ..., "…"
### END SOLUTION
lab.predict("second stream", guess, because=why)

# %% [markdown] name="run-text" part="core" minutes=4
# ## Run it: memory × streams

# %% name="run"
traces = {}
for memory in ("pageable", "pinned"):
    for count in (1, 2):
        tasks = streams.pairs(dev, memory)
        traces[memory, count] = streams.timed(dev, two_tasks, tasks, queues[:count])
del tasks  # they are large
rows = [(memory, count, trace.wall_ns / 1e6) for (memory, count), trace in traces.items()]
lab.Table(["host memory", "streams", "ms"], rows)

# %% name="reveal-1"
lab.reveal("second stream", traces["pinned", 1].wall_ns / traces["pinned", 2].wall_ns)

# %% name="look-two"
lab.show(traces["pinned", 2], "two tasks, pinned, two streams", bound=True)

# %% [markdown] name="explain-1"
# ## Explain
#
# On the simulated H200, pinning makes the program {{pin_gain}} times faster.
# The second stream makes it {{stream_gain}} times as fast: next to nothing. Look at the picture.
#
# * A copy takes {{copy_us}} µs and a kernel {{add_us}} µs: the copy is {{copy_per_add}} times as long.
#   Hiding all of the kernel would gain that little and no more.
# * The two copies go the same way. The GPU has one **copy engine** for each direction.
#   So the second copy waits for the first, whatever stream it is on.
#
# Streams let lanes work at the same time. A **lane** is something that does one thing at a time:
# the host, a copy direction, the GPU's compute units.
# When one lane has nearly all of the work, there is nothing to put beside it.

# %% [markdown] name="balance-text" part="core" minutes=3
# ## More work per byte
#
# Now a job with three equal lanes: copy in, compute, copy out.
# The kernel does `k` rounds of a random-number step on each element.
# The next cell finds the `k` for which the kernel takes as long as one copy, on your device,
# and shows `k` and the job.

# %% name="balance"
k = streams.balanced_rounds(dev)
job = streams.job(dev, rounds(k))
k, job

# %% [markdown] name="piece-text"
# One stream runs the three one after the other.

# %% name="one-piece"
def in_one_piece(dev, job, queue):
    queue.copy(job.d, job.h_in)
    queue.launch(job.kernel, reads=[job.d], writes=[job.d])
    queue.copy(job.h_out, job.d)
    dev.synchronize()


one = streams.timed(dev, in_one_piece, job, queues[0])
lab.show(one, "in one piece, on one stream")

# %% name="lanes"
lab.Table(["lane", "µs"], [(lane, ns / 1e3) for lane, ns in streams.lane_ns(one).items()])

# %% [markdown] name="chunk-text"
# To overlap the lanes, cut the job into parts.
# A **chunk** is such a part: it is copied in, computed and copied back by itself.
# While chunk 1 is computed, chunk 2 can be copied in.
# `in_chunks(dev, job, chunks, queues)` deals the chunks out to streams like cards.
# You write your own in exercise 1.

# %% name="two-chunks"
from heterolab.lab.streams import in_chunks

lab.show(streams.timed(dev, in_chunks, job, 2, queues[:2]), "two chunks, two streams")

# %% [markdown] name="predict-2-text"
# Predict: how many times faster is it in **8 chunks on four streams** than in one piece on one stream?
# Both use pinned memory and do the same work.

# %% name="predict-2"
### BEGIN SOLUTION
guess, why = 2.4, "three lanes at once, less the first chunk's way in and the last one's way out."
### STUDENT
# guess, why = ..., "…"
### END SOLUTION
lab.predict("eight chunks", guess, because=why)

# %% [markdown] name="turn-text" part="core" minutes=5
# ## Turn three knobs
#
# Find the best number of chunks. Then find out how many streams it takes, and what memory does.
# The panel's speed-up is over *pinned, one piece, one stream*.

# %% name="panel"
lab.streams_panel(dev, job)

# %% name="reveal-2"
eight = streams.timed(dev, in_chunks, job, 8, queues[:4])
lab.reveal("eight chunks", one.wall_ns / eight.wall_ns)

# %% name="look-eight"
lab.show([one, eight], "the same work: in one piece, and in 8 chunks on four streams")

# %% [markdown] name="sweep-text"
# All numbers of chunks at once, with two streams and with four.

# %% name="sweep"
sizes = [1, 2, 4, 8, 16, 32, 64, 256]
curves = {}
for count in (4, 2):
    runs = {n: streams.timed(dev, in_chunks, job, n, queues[:count]) for n in sizes}
    curves[f"{count} streams"] = {n: one.wall_ns / trace.wall_ns for n, trace in runs.items()}
curves["bound"] = {n: streams.speed_up_bound(n) for n in sizes}
lab.curve(curves, x="chunks", y="speed-up", title="Speed-up over one piece", dashed="bound")

# %% [markdown] name="explain-2" part="core" minutes=4
# ## Explain
#
# **Overlap** is the time in which two lanes work at once. Here is the least time it leaves.
# With `n` chunks, the first one passes through all three lanes: 3 steps.
# Then one chunk a step comes out: `n` − 1 more. In one piece it would be 3`n` steps.
# So the speed-up is at most 3`n` / (`n` + 2). This **bound** is the dashed line.
#
# * 4 chunks: at most {{bound_4}}, and the simulated H200 gets {{gain_4}}.
#   16 chunks: at most {{bound_16}}, and it gets {{gain_16}}. The more chunks, the further below.
# * 256 chunks: {{gain_256}}. Each chunk costs the host three calls, and small copies are slow.
#   Then the host is the lane that limits.
# * Two streams stop near {{two_best}}. To fill three lanes, three chunks must be under way.

# %% [markdown] name="not-text" part="core" minutes=4
# ## Where it does not help
#
# Three jobs, each in 8 chunks on four streams. Guess each one before you run it.

# %% name="not-heavy"
heavy = job.with_kernel(rounds(10 * k))
alone = streams.timed(dev, streams.serial, heavy)
cut = streams.timed(dev, in_chunks, heavy, 8, queues[:4])
lab.show([alone, cut], f"ten times the work: × {alone.wall_ns / cut.wall_ns:.2f}")

# %% [markdown] name="not-heavy-why"
# **One lane dominates**: × {{heavy_gain}}. The kernel alone takes most of the time.
# All copies are hidden behind it, and that is all there is to hide.

# %% name="not-pageable"
ordinary = streams.job(dev, rounds(k), memory="pageable")
cut = streams.timed(dev, in_chunks, ordinary, 8, queues[:4])
lab.show([one, cut], f"pinned in one piece, pageable in chunks: × {one.wall_ns / cut.wall_ns:.2f}")

# %% [markdown] name="not-pageable-why"
# **Pageable memory**: × {{pageable_gain}}, slower than pinned memory in one piece.
# A copy from pageable memory holds the host until its bytes are staged.
# Meanwhile the host cannot issue the next chunk.

# %% name="not-empty"
nothing = job.with_kernel(empty())
alone = streams.timed(dev, streams.serial, nothing)
cut = streams.timed(dev, in_chunks, nothing, 8, queues[:4])
lab.show([alone, cut], f"a kernel that does nothing: × {alone.wall_ns / cut.wall_ns:.2f}")

# %% [markdown] name="not-empty-why"
# **No kernel to speak of**: × {{empty_gain}}. That looks like a success, so beware.
# Nothing is computed beside a copy here: copies to the GPU run beside copies from it.
# Before you praise streams, look at *which* lanes overlap.

# %% [markdown] name="exercise-1-text" part="core" minutes=5
# ## Exercise 1 · Overlap a job
#
# Write `overlap(dev, job, chunks, queues)`.
#
# * Cut the job with `job.parts(chunks)` and use all the streams in `queues`, each for several chunks.
# * Every byte goes in once and comes back once. The result equals NumPy's.
# * It takes at most 1.2 times the least time, and the host waits once.
#
# `job.d[part]` is a part of a buffer. Begin with `in_one_piece` above.


# %% name="exercise-1"
def overlap(dev, job, chunks, queues):
    ### BEGIN SOLUTION
    for i, part in enumerate(job.parts(chunks)):
        queue, d = queues[i % len(queues)], job.d[part]
        queue.copy(d, job.h_in[part])
        queue.launch(job.kernel, reads=[d], writes=[d])
        queue.copy(job.h_out[part], d)
    dev.synchronize()
    ### END SOLUTION


lab.show(streams.record(dev, overlap, job, 8, queues[:4]), "your job")

# %% name="check-1"
lab.check("03-1", overlap, on=dev)

# %% [markdown] name="exercise-2-text" part="core" minutes=4
# ## Exercise 2 · Repair four programs
#
# Each of these four stays far from the speed-up that you saw. For each one, find the cause.
# The causes are `"pageable"`, `"default stream"`, `"sync"`, `"one chunk"` and `"cannot"`.
# Then change **one** statement so that it overlaps. For one program nothing can help: leave it.
#
# The *default stream* waits for all blocking streams, and they wait for it.
# `dev.streams(n)` makes streams that do neither. `non_blocking=False` below makes blocking ones,
# as a plain `cudaStreamCreate` does.


# %% name="program-a"
def program_a(dev, kernel, queues):
    ### BEGIN SOLUTION
    job = streams.job(dev, kernel, memory="pinned")
    ### STUDENT
    # job = streams.job(dev, kernel, memory="pageable")
    ### END SOLUTION
    for i, part in enumerate(job.parts(8)):
        queue = queues[i % 4]
        queue.copy(job.d[part], job.h_in[part])
        queue.launch(kernel, [job.d[part]], [job.d[part]])
        queue.copy(job.h_out[part], job.d[part])
    return job


lab.show(streams.record(dev, program_a, rounds(k), queues[:4]), "program a")


# %% name="program-b"
blocking = streams.queues(dev, 4, non_blocking=False)


def program_b(dev, kernel, queues):
    job = streams.job(dev, kernel, memory="pinned")
    for i, part in enumerate(job.parts(8)):
        queue = queues[i % 4]
        queue.copy(job.d[part], job.h_in[part])
        ### BEGIN SOLUTION
        queue.launch(kernel, [job.d[part]], [job.d[part]])
        ### STUDENT
        # dev.default_stream.launch(kernel, [job.d[part]], [job.d[part]])
        ### END SOLUTION
        queue.copy(job.h_out[part], job.d[part])
    return job


lab.show(streams.record(dev, program_b, rounds(k), blocking), "program b")


# %% name="program-c"
def program_c(dev, kernel, queues):
    job = streams.job(dev, kernel, memory="pinned")
    for i, part in enumerate(job.parts(8)):
        queue = queues[i % 4]
        queue.copy(job.d[part], job.h_in[part])
        queue.launch(kernel, [job.d[part]], [job.d[part]])
        queue.copy(job.h_out[part], job.d[part])
        ### BEGIN SOLUTION
        ### STUDENT
        # queue.synchronize()
        ### END SOLUTION
    return job


lab.show(streams.record(dev, program_c, rounds(k), queues[:4]), "program c")


# %% name="program-d"
def program_d(dev, kernel, queues):
    job = streams.job(dev, kernel, memory="pinned")
    for i, part in enumerate(job.parts(8)):
        queue = queues[i % 4]
        queue.copy(job.d[part], job.h_in[part])
        queue.launch(kernel, [job.d[part]], [job.d[part]])
        queue.copy(job.h_out[part], job.d[part])
    return job


lab.show(streams.record(dev, program_d, rounds(10 * k), queues[:4]), "program d")

# %% name="check-2"
### BEGIN SOLUTION
causes = {"a": "pageable", "b": "default stream", "c": "sync", "d": "cannot"}
### STUDENT
# causes = {"a": "…", "b": "…", "c": "…", "d": "…"}
### END SOLUTION
programs = {"a": program_a, "b": program_b, "c": program_c, "d": program_d}
lab.check("03-2", {name: (programs[name], causes[name]) for name in programs}, on=dev)

# %% [markdown] name="decide-text" part="core" minutes=2
# ## Decide
#
# A colleague wants to "add streams" to a service. What do you measure first, and when do you say no?
# One line. It goes into your report, with the milliseconds a job costs on CPU, link and GPU.

# %% name="decide"
### BEGIN SOLUTION
decision = "Measure the lanes first; pin; then a few chunks on as many streams as lanes, if lanes are equal."
### STUDENT
# decision = "…"
### END SOLUTION
lab.decide("03", decision, eight)

# %% [markdown] name="real-text" part="stretch" minutes=3
# ## On a real GPU
#
# A recording of the same job in 8 chunks, beside what ran here. Where do the two differ most?

# %% name="real"
lab.replay("03-chunks-8", "8 chunks on four streams: here, and recorded", beside=eight)

# %% [markdown] name="exercise-3-text" part="stretch" minutes=8
# ## Exercise 3 · Five things are missing
#
# The article's code copies one operand, launches the kernel, and ends. Nobody can use the result.
# Two of the five missing things are here already: the host arrays are pinned, and errors are raised.
# Add the other three, so that `h_c` of both tasks holds the sum when the function returns.


# %% name="exercise-3"
def add_both(dev, tasks, queues):
    for task, queue in zip(tasks, queues):
        queue.copy(task.d_a, task.h_a)
        ### BEGIN SOLUTION
        queue.copy(task.d_b, task.h_b)
        queue.launch(vector_add(), reads=[task.d_a, task.d_b], writes=[task.d_c])
        queue.copy(task.h_c, task.d_c)
    dev.synchronize()
    ### STUDENT
        # queue.launch(vector_add(), reads=[task.d_a, task.d_b], writes=[task.d_c])
    ### END SOLUTION


lab.show(streams.record(dev, add_both, streams.sums(dev), queues[:2]), "two sums")

# %% name="check-3"
lab.check("03-3", add_both, on=dev)

# %% [markdown] name="home-text" part="home" minutes=15
# ## At home
#
# * Open `sim:t4` in the second cell and run all. Which numbers change, and which do not?
# * Is there a job in which five streams beat four? Say what the fifth lane would be.
#
# Read on: M. Harris, *How to Overlap Data Transfers in CUDA C/C++*; the chapter on streams in the
# *CUDA C++ Programming Guide*.
#
# *The numbers in this text: {{provenance}}.*
