"""``kvtierd`` on a processor of a kind that it does not know, as far as it can tell."""

import platform

if __name__ == "__main__":
    platform.machine = lambda: "riscv64"
    from kvtierd.main import main  # what it imports asks for the kind once

    main()
