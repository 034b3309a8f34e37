"""Uses memory at random: client.py MIB SECONDS WRITES PAUSE_US. Each page begins with a number that
is checked at each use; of WRITES of 1 it is changed. Between two uses it sleeps."""
import mmap
import random
import struct
import sys
import time

PAGE = 4096
mib, seconds, writes, pause = (float(word) for word in sys.argv[1:])
pages = int(mib) * 256
memory = mmap.mmap(-1, pages * PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
versions = [0] * pages
chance = random.Random(pages)
fill = chance.randbytes(PAGE - 16)


def write(page):
    versions[page] += 1
    memory[page * PAGE : page * PAGE + 16] = struct.pack("QQ", page, versions[page])


for page in range(pages):
    memory[page * PAGE + 16 : (page + 1) * PAGE] = fill
    write(page)
end = time.monotonic() + seconds
while time.monotonic() < end:
    page = chance.randrange(pages)
    if memory[page * PAGE : page * PAGE + 16] != struct.pack("QQ", page, versions[page]):
        sys.exit(86)
    if chance.random() < writes:
        write(page)
    if pause:
        time.sleep(pause / 1e6)
