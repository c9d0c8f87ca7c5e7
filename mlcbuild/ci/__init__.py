"""A build on many machines of a CI system: what to build, who builds what, and what to tell.

matrix.py    variants that need work -> jobs for GitHub, GitLab or anything that reads JSON
split.py     steps -> shards; every machine finds the same split by itself
affected.py  a range of Git commits -> variants whose inputs changed in it
outputs.py   what a run did -> JUnit, a summary in Markdown, annotations
"""
