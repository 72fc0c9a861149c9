"""How `make test` decides: limits of time, a record of every test, and a second look at failures that may be noise.

| module | what it does |
|---|---|
| `time_limit` | pytest plugin: ends a test process whose test runs for too long, and shows where it was |
| `record` | pytest plugin: writes what became of every test to a file, and why a failure is final |
| `seeds` | pytest plugin: the seeds that tests draw; a second look draws the same ones |
| `processes` | the processes that a run has started, and their end |
| `second_look` | which failures are looked at again, alone, and what counts then |
| `steady` | runs tests again and again beside two busy loops: `make steady` |
| `ledger` | the file of unstable tests, which outlives the checkout |

`scripts/run_tests.py` uses them.
"""
