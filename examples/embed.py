"""The driver in a decode scheduler, on the CPU: `python -m examples.conversation` runs it."""

import kvlift

PAGE = kvlift.PageLayout(
    kind="mha", n_layers=4, n_kv_heads=2, head_dim=16, dtype="float32", page_tokens=16
)


def open_driver(folder: str) -> kvlift.Driver:
    config = kvlift.Config(page_tokens=16, device_pages=64, host_pages=64, prefetch_min_pages=1)
    memory = kvlift.LayeredMemory.allocate(PAGE, config.device_pages)  # your engine's KV tensors
    host = kvlift.HostPool(config.host_pages, PAGE.page_bytes)
    wakeup = kvlift.Wakeup()
    ports = kvlift.Ports(
        copies=kvlift.CpuCopies(host, memory, on_landed=wakeup.ring),
        store=kvlift.FileStore(folder, host, memory, on_landed=wakeup.ring),
        peers=kvlift.ZmqPeers(memory, PAGE.fingerprint(), on_landed=wakeup.ring),
        ranks=kvlift.LoneRank(kvlift.ballot_length(config.policy())),
        clock=kvlift.MonotonicClock(),
        wakeup=wakeup,
    )
    return kvlift.Driver(config, ports)


def serve(driver: kvlift.Driver, rid: str, tokens: list[int], peer: str) -> kvlift.Ended:
    space = kvlift.Namespace(model="made-up", layout=PAGE.fingerprint(), page_tokens=16)
    prompt = kvlift.Prompt(space.digest(), kvlift.token_bytes(tokens), page_tokens=16)
    driver.submit(rid, prompt, peer=peer, n_pages_output=1)
    while True:
        tick = driver.tick()  # once a scheduling step: starts work, waits for none
        for ready in tick.ready:  # every page is in place: ready.device_pages
            print(rid, {source.value: n for source, n in ready.n_pages_by_source.items() if n})
            driver.run(ready.rid)  # your batch decodes it; this one samples 7 and 8
            driver.finish(ready.rid, kvlift.token_bytes([ready.token or 0, 7, 8]))
        if tick.ended:  # done, aborted, or failed and perhaps retryable, with a reason
            return tick.ended[0]
        driver.wait(0.002 if tick.is_busy else 1.0)  # only where the batch is empty
