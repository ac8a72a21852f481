"""One process a run folder: two that write the same logs and checkpoints would damage both."""

import errno
import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

NO_LOCKS = {errno.EBADF, errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL}  # of some network file systems


@contextmanager
def only_process(folder: Path) -> Iterator[None]:
    """Hold a folder while the block runs. The system lets go of it when the process ends, however it ends.

    No file is left. A file system without locks gives none.
    Raises: ValueError if another process, or another block of this one, holds it, or it is no folder.
    """
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        raise ValueError(f"run must be the folder of a run, got {folder} ({error.strerror})") from None
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(f"run must be in use by no other process, got {folder} which is") from None
        except OSError as error:
            if error.errno not in NO_LOCKS:
                raise
        yield
    finally:
        os.close(descriptor)
