import sys

from mlcbuild.cli import main

sys.exit(main())
