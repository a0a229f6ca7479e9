"""Programs as users of mpi4py write them; rank 0 prints the results. Only the line `{IMPORT}` differs."""

PI = """
{IMPORT}
import numpy

comm = MPI.COMM_WORLD
n = numpy.array(1000 if comm.rank == 0 else 0, "i")
comm.Bcast([n, MPI.INT], root=0)
h = 1.0 / n
s = sum(4.0 / (1.0 + (h * (i + 0.5)) ** 2) for i in range(comm.rank, int(n), comm.size))
mine, pi = numpy.array(s * h, "d"), numpy.array(0.0, "d")
comm.Reduce([mine, MPI.DOUBLE], [pi, MPI.DOUBLE], op=MPI.SUM, root=0)
if comm.rank == 0:
    print(f"pi {pi:.10f}")
"""

PRODUCT = """
{IMPORT}
import numpy as np

def product(comm, a, x):
    whole = np.zeros(a.shape[1])
    comm.Allgather([x, MPI.DOUBLE], [whole, MPI.DOUBLE])
    return a @ whole

comm = MPI.COMM_WORLD
rows, n = 4, 4 * comm.Get_size()
a = np.arange(rows * n, dtype="d").reshape(rows, n) + comm.Get_rank()
y = product(comm, a, np.arange(rows, dtype="d"))
result = comm.gather(y.sum(), root=0)
if comm.Get_rank() == 0:
    print("products", result)
"""

RELAXATION = """
{IMPORT}
import numpy as np

comm = MPI.COMM_WORLD
rank, size = comm.Get_rank(), comm.Get_size()
up, down = (rank - 1 if rank else MPI.PROC_NULL), (rank + 1 if rank < size - 1 else MPI.PROC_NULL)
u = np.zeros((6, 8))
u[0] = rank == 0
steps = 0
while True:
    new = u.copy()
    new[1:-1, 1:-1] = (u[:-2, 1:-1] + u[2:, 1:-1] + u[1:-1, :-2] + u[1:-1, 2:]) / 4
    comm.Sendrecv(new[1], up, 11, new[-1], down, 11)
    comm.Sendrecv(new[-2], down, 12, new[0], up, 12)
    still = np.array(np.abs(new - u).max() < 1e-3, "i")
    all_still = np.zeros_like(still)
    comm.Allreduce([still, MPI.INT], [all_still, MPI.INT], op=MPI.LAND)
    u, steps = new, steps + 1
    if all_still:
        break
table = np.empty((size, 4, 8)) if rank == 0 else None
comm.Gather(np.ascontiguousarray(u[1:-1]), table, root=0)
if rank == 0:
    print("relaxed after", steps, "steps:", np.round(table.sum(), 6))
"""

PERSISTENT = """
{IMPORT}
import numpy as np

comm = MPI.COMM_WORLD
rank, size = comm.rank, comm.size
left, right = (rank - 1) % size, (rank + 1) % size
column = np.zeros((5, 4), order="F")
requests = [
    comm.Send_init([column[:, 1], MPI.DOUBLE], left, 0), comm.Send_init([column[:, 2], MPI.DOUBLE], right, 1),
    comm.Recv_init([column[:, 0], MPI.DOUBLE], left, 1), comm.Recv_init([column[:, 3], MPI.DOUBLE], right, 0),
]
for turn in range(3):
    column[:, 1:3] = rank + turn
    MPI.Prequest.Startall(requests)
    MPI.Request.Waitall(requests)
    assert (column[:, 0] == left + turn).all() and (column[:, 3] == right + turn).all()
for request in requests:
    request.Free()
total = comm.reduce(float(column.sum()), op=MPI.SUM, root=0)
if rank == 0:
    print("columns", total)
"""

WORKERS = """
{IMPORT}

READY, TASK, DONE, STOP = range(1, 5)
comm, status = MPI.COMM_WORLD, MPI.Status()
if comm.rank == 0:
    tasks, results, stopped = list(range(20)), {}, 0
    while stopped < comm.size - 1:
        answer = comm.recv(source=MPI.ANY_SOURCE, tag=MPI.ANY_TAG, status=status)
        if status.Get_tag() == DONE:
            results[answer[0]] = answer[1]
        elif tasks:
            comm.send(tasks.pop(), dest=status.Get_source(), tag=TASK)
        else:
            comm.send(None, dest=status.Get_source(), tag=STOP)
            stopped += 1
    print("squares", sorted(results.items()))
else:
    while True:
        comm.send(None, dest=0, tag=READY)
        task = comm.recv(source=0, tag=MPI.ANY_TAG, status=status)
        if status.tag == STOP:
            break
        comm.send((task, task * task), dest=0, tag=DONE)
"""

RAGGED = """
{IMPORT}
import numpy as np

comm = MPI.COMM_WORLD
rank, size = comm.Get_rank(), comm.Get_size()
counts = np.array([3 + r for r in range(size)])
places = np.insert(np.cumsum(counts), 0, 0)[:-1]
data = np.arange(counts.sum(), dtype="d") if rank == 0 else None
mine = np.empty(counts[rank])
comm.Scatterv([data, counts, places, MPI.DOUBLE], mine, root=0)
mine *= rank + 1
back = np.empty(counts.sum()) if rank == 0 else None
comm.Gatherv(mine, [back, counts, places, MPI.DOUBLE], root=0)
everywhere = np.empty(counts.sum())
comm.Allgatherv([mine, MPI.DOUBLE], [everywhere, (counts, places), MPI.DOUBLE])
sent = [rank + 1] * size
out = np.empty(sum(range(1, size + 1)), "i")
comm.Alltoallv([np.full(sum(sent), rank, "i"), sent], [out, list(range(1, size + 1))])
same = comm.allreduce(bool((everywhere == comm.bcast(back)).all()), op=MPI.LAND)
if rank == 0:
    print("ragged", back.tolist(), same, out.tolist())
"""

BACKGROUND = """
{IMPORT}
import numpy as np

comm = MPI.COMM_WORLD
rank, size = comm.Get_rank(), comm.Get_size()
big = np.full(200000, rank, "i")
inbox = [np.empty(200000, "i") for _ in range(size)]
requests = [comm.Irecv(inbox[peer], source=peer, tag=77) for peer in range(size) if peer != rank]
requests += [comm.Isend(big, dest=peer, tag=77) for peer in range(size) if peer != rank]
total = np.empty_like(big)
reducing = comm.Iallreduce(big, total)
statuses = [MPI.Status() for _ in requests]
MPI.Request.Waitall(requests, statuses)
assert all((inbox[p] == p).all() for p in range(size) if p != rank)
assert sorted(s.source for s in statuses[: size - 1]) == [p for p in range(size) if p != rank]
assert all(s.Get_count(MPI.INT) == 200000 for s in statuses[: size - 1])
while not reducing.Test():
    pass
split = comm.Split(color=rank % 2, key=rank)
ids = split.allgather(rank)
split.Free()
if rank == 0:
    print("background", int(total[0]), ids)
"""

GRID = """
{IMPORT}
import numpy as np

world = MPI.COMM_WORLD
grid = world.Create_cart(MPI.Compute_dims(world.size, [0, 1]), periods=[True, False], reorder=False)
source, dest = grid.Shift(0, 1)
x, y = np.full(3, grid.rank, "l"), np.empty(3, "l")
grid.Sendrecv(x, dest, 0, y, source, 0)
up, down = grid.Shift(1, 1)
assert up == down == MPI.PROC_NULL
rows = grid.Sub([True, False])
found = grid.gather((grid.coords, int(y[0]), rows.size), root=0)
if world.rank == 0:
    print("grid", grid.dims, found)
"""

PROBED = """
{IMPORT}
from array import array

comm, status = MPI.COMM_WORLD, MPI.Status()
if comm.rank:
    comm.Send([array("i" if comm.rank % 2 else "f", [comm.rank] * 5), 5, MPI.INT if comm.rank % 2 else MPI.FLOAT], 0, comm.rank)
else:
    found = []
    for _ in range(comm.size - 1):
        comm.Probe(MPI.ANY_SOURCE, MPI.ANY_TAG, status)
        odd = status.Get_source() % 2
        buffer = array("i" if odd else "f", [0] * 9)
        comm.Recv([buffer, MPI.INT if odd else MPI.FLOAT], status.Get_source(), status.Get_tag(), status)
        found.append((status.source, status.tag, status.Get_count(MPI.INT if odd else MPI.FLOAT), list(buffer)))
    print("probed", sorted(found))
"""

HALOS = """
{IMPORT}
import numpy as np

comm = MPI.COMM_WORLD
comm.Barrier()  # the program before may receive from anybody
left, right = (comm.rank - 1) % comm.size, (comm.rank + 1) % comm.size
rows, columns = 5, 7
u = np.arange(rows * columns, dtype="d").reshape(rows, columns) + 100 * comm.rank
column = MPI.DOUBLE.Create_vector(rows, 1, columns).Commit()
requests = [
    comm.Isend([u, (1, 0), column], left, 1), comm.Irecv([u.ravel()[columns - 1 :], 1, column], right, 1),
]
MPI.Request.Waitall(requests)
sent = MPI.DOUBLE.Create_subarray([rows, columns], [2, 3], [1, 1]).Commit()
wanted = MPI.DOUBLE.Create_subarray((rows, columns), (2, 3), (3, 4), order=MPI.ORDER_C).Commit()
comm.Sendrecv([u, 1, sent], right, 2, [u, 1, wanted], left, 2)
fortran = MPI.DOUBLE.Create_subarray([columns, rows], [2, 2], [0, 3], order=MPI.ORDER_FORTRAN).Commit()
comm.Sendrecv_replace([u, 1, fortran], right, 3, left, 3)
pairs = MPI.INT.Create_indexed([2, 1], [4, 0]).Commit()
row = MPI.DOUBLE.Create_contiguous(columns).Commit()
block = row.Create_vector(2, 1, 3).Commit()
numbers = np.arange(12, dtype="i") + comm.rank
packed, status = np.zeros(6, "i"), MPI.Status()
comm.Sendrecv([numbers, 2, pairs], right, 4, packed, left, 4, status)
v = np.zeros((rows, columns))
comm.Sendrecv([u, 1, block], right, 5, [v, 2, row], left, 5)
told = [status.Get_count(MPI.INT), status.Get_count(pairs)]
sizes = [(t.Get_size(), t.Get_extent()) for t in (column, sent, fortran, row, block)]
for kind in (column, sent, wanted, fortran, pairs, row, block):
    kind.Free()
found = comm.gather((u.tolist(), packed.tolist(), told, v.sum(), sizes), root=0)
if comm.rank == 0:
    print("halos", found)
"""

PROGRAMS = {name.lower(): text for name, text in globals().items() if name.isupper() and isinstance(text, str)}
