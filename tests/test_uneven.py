from tests import workers


def test_workers_that_run_out_of_data_leave_and_nobody_hangs():
    for worker in workers.run_ok(5, ["-m", "tests.uneven_driver"], timeout=120):
        assert "all done" in worker.out
