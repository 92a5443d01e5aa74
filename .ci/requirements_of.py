"""Print what a wheel requires, but torch and what is built with it: those come first, as one build.

python requirements_of.py WHEEL
"""

import re
import sys
import zipfile
from email.parser import Parser

with zipfile.ZipFile(sys.argv[1]) as wheel:
    name = next(name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
    described = Parser().parsestr(wheel.read(name).decode())
for requirement in described.get_all("Requires-Dist") or []:
    name = re.match(r"[A-Za-z0-9._-]+", requirement)[0].lower()
    if "extra ==" not in requirement and not name.startswith("torch") and name != "intel-openmp":
        print(requirement)
