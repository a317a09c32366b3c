import os
import signal
import threading

import pytest

from partita_trainers.interrupt import ask_to_stop, interruption

SIGNALS = [signal.SIGINT, signal.SIGTERM]


@pytest.mark.parametrize("number", SIGNALS)
def test_the_first_signal_is_recorded_and_the_second_stops_at_once(
    number: signal.Signals, caplog: pytest.LogCaptureFixture
) -> None:
    before = signal.getsignal(number)
    with caplog.at_level("INFO"), interruption("stopping soon") as interrupt:
        assert not interrupt.requested
        os.kill(os.getpid(), number)
        assert interrupt.requested
        by_user = number == signal.SIGINT
        assert caplog.messages == ["stopping soon; interrupt again to stop now" if by_user else "stopping soon"]
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), number)
    assert signal.getsignal(number) == before


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_that_the_process_ignores_stays_ignored(number: signal.Signals) -> None:
    before = signal.signal(number, signal.SIG_IGN)
    try:
        with interruption("stopping soon") as interrupt:
            os.kill(os.getpid(), number)
            os.kill(os.getpid(), number)
        assert not interrupt.requested
        assert signal.getsignal(number) == signal.SIG_IGN
    finally:
        signal.signal(number, before)


def test_other_threads_are_not_interrupted() -> None:
    results: list[bool] = []

    def work() -> None:
        with interruption("stopping soon") as interrupt:
            results.append(interrupt.requested)

    before = [signal.getsignal(number) for number in SIGNALS]
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert results == [False]
    assert [signal.getsignal(number) for number in SIGNALS] == before


def test_a_thread_can_be_stopped_by_another() -> None:
    results = []

    def work() -> None:
        with interruption("stopping soon") as interrupt:
            results.extend([interrupt.requested, ask_to_stop(), interrupt.requested])

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()

    assert results == [False, True, True]
    assert not ask_to_stop(), "no thread is waiting for a stop"
