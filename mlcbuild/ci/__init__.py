"""Builds on many machines of a CI system.

job_matrix.py    variants that need work -> jobs for GitHub, GitLab or any reader of JSON
split.py         steps -> shards; every machine computes the same split
shard_phases.py  steps of one shard -> results; first those that need few results of other shards
affected.py      a range of Git commits -> variants whose inputs changed in it
ci_reports.py    results of a run -> JUnit XML, a summary in Markdown
"""
