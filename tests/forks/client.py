"""To its caller the interpreter, but the program is forked by `server.py`: `client.py SOCKET CLIENT PYTHON ARGUMENT...`.

It passes on its signals, and ends as the program does. The program runs in the network, host name and mount namespaces of its
caller: on the same simulated host. It becomes PYTHON with options beyond `-u`, `-P`, `-m` and `-c`, and where mpirun starts it,
which watches its process.
"""

import array
import itertools
import marshal
import os
import resource
import signal
import socket
import sys

PASSED_ON = signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2

NAMESPACES = "net", "uts", "mnt"

LIMITS = [number for name, number in vars(resource).items() if name.startswith("RLIMIT_")]


def main():
    path, client, python, *arguments = sys.argv[1:]
    options = list(itertools.takewhile(("-u", "-P").__contains__, arguments))
    program = arguments[len(options) :]
    other_options = not program or (program[0].startswith("-") and program[0] not in ("-m", "-c"))
    if other_options or "PMIX_RANK" in os.environ:
        os.execv(python, [python, *arguments])
    server = socket.socket(socket.AF_UNIX)
    server.connect(path)
    limits = {number: resource.getrlimit(number) for number in LIMITS}
    request = marshal.dumps([client, program, options, os.getcwd(), dict(os.environ), limits])
    namespaces = [os.open(f"/proc/self/ns/{name}", os.O_RDONLY) for name in NAMESPACES]
    passed = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [0, 1, 2, *namespaces]))]
    server.sendmsg([len(request).to_bytes(8, "big")], passed)
    server.sendall(request)
    child = receive(server)
    for number in PASSED_ON:
        signal.signal(number, lambda number, _: os.kill(child, number))
    code = receive(server)
    if code < 0:
        if -code != signal.SIGKILL:
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


def receive(server):
    number = server.recv(4, socket.MSG_WAITALL)
    if len(number) < 4:
        raise OSError("the server that forks programs has ended")
    return int.from_bytes(number, "big", signed=True)


main()
