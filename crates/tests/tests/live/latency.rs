//! Latency bounds of real programs: what the report says of them must add up, and no byte is wrong.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;
use std::path::Path;

use undercroft_tests::{Job, MIB, Outcome, Running, build, find, skip, turn, undercroft};

/// Goes round memory whose words are checked, over a pool and a file.
fn tried_with(bound: &str) -> Outcome {
    let folder = tempfile::tempdir().expect("a scratch folder");
    let spill = folder.path().join("spill").display().to_string();
    Job::new(build("touch"))
        .args(["96", "--rounds", "3"])
        .limit(24 * MIB)
        .options(["--latency", bound, "--prefetch", "none"])
        .tier("ram,max=3M")
        .tier(&format!("file:{spill},size=1G"))
        .run()
}

fn loop_with(bound: &str) -> Outcome {
    tried_with(bound).expect(0).expect_swapping(10_000.0)
}

fn count(outcome: &Outcome, name: &str) -> u64 {
    let path = format!("latency_bound.{name}");
    let number = outcome.number(&path);
    number.unwrap_or_else(|| panic!("no number `{path}` in the report: {outcome}")) as u64
}

/// Counts of page-ins agree with the engine's, and those of windows with each other.
fn check_counts(outcome: &Outcome) {
    let measured = count(outcome, "page_ins") + count(outcome, "page_ins_pending");
    let loaded = outcome.number("faults.swap_in").expect("a report") as u64;
    // A page-in that meets a layout event faults again; this program changes its layout only at the
    // start. What another thread loads has no page-in of its own.
    assert!(
        measured <= loaded && measured * 10 >= loaded * 9,
        "{measured} page-ins of {loaded} loads: {outcome}"
    );
    assert!(count(outcome, "page_ins_over") <= count(outcome, "page_ins"));
}

#[test]
fn a_generous_bound_is_kept_in_every_window() {
    turn!(one_at_a_time, "a plain run has no bound");
    let outcome = loop_with("p99=20s");
    check_counts(&outcome);
    assert!(count(&outcome, "windows_kept") > 0, "{outcome}");
    assert_eq!(count(&outcome, "windows_missed"), 0, "{outcome}");
    assert_eq!(count(&outcome, "page_ins_over"), 0, "{outcome}");
    let seconds = |name: &str| outcome.number(&format!("latency_bound.{name}"));
    let (tail, worst) = (seconds("tail_seconds"), seconds("worst_window_seconds"));
    assert!(tail > Some(1e-6) && worst >= tail, "{outcome}");
}

#[test]
fn a_bound_that_no_page_in_can_keep_is_missed_in_every_window() {
    turn!(one_at_a_time, "a plain run has no bound");
    // The start refuses what the shortest load takes longer than, and names what is left: twice
    // that is accepted. But many pages come from the file.
    let refused = tried_with("p99=1us").expect(125);
    let left = refused.errors.split("at least; p99=").nth(1);
    let left = left.and_then(|text| text.split("us could be kept").next()?.parse().ok());
    let left: f64 = left.unwrap_or_else(|| panic!("no bound is named: {refused}"));
    let outcome = loop_with(&format!("p99={:.0}us", 2.0 * left));
    check_counts(&outcome);
    assert_eq!(count(&outcome, "windows_kept"), 0, "{outcome}");
    assert!(count(&outcome, "windows_missed") > 0, "{outcome}");
    let (over, all) = (
        count(&outcome, "page_ins_over"),
        count(&outcome, "page_ins"),
    );
    assert!(over * 10 > all, "{over} of {all}: {outcome}");
}

/// The last tier is as slow as a disk, which takes milliseconds a page. All pages are there at
/// first. Control has to move the program to the buffer above, where page-ins take microseconds.
#[test]
fn a_bound_that_the_device_misses_is_kept_once_control_has_moved_the_pages() {
    turn!(one_at_a_time, "a plain run has no bound");
    let folder = tempfile::tempdir().expect("a scratch folder");
    let path = |name: &str| folder.path().join(name).display().to_string();
    let outcome = Job::new(build("touch"))
        .args(["12", "--rounds", "200"])
        .limit(8 * MIB)
        .options(["--latency", "p90=3ms", "--prefetch", "none"])
        .tier(&format!(
            "nvm:{},size=64M,shape=optane-dimm",
            path("buffer")
        ))
        .tier(&format!("file:{},size=64M,shape=hdd-7200", path("disk")))
        .timeout(300)
        .run()
        .expect(0);
    check_counts(&outcome);
    let reads = |tier: usize| {
        let report = outcome.report.as_ref().expect("a report");
        report["tiers"][tier]["reads"].as_u64().unwrap_or(0)
    };
    // The first round: control begins only when a window has missed the bound.
    assert!(count(&outcome, "windows_missed") > 0, "{outcome}");
    assert!(reads(1) > 100, "{outcome}");
    // Every later one comes from the buffer.
    assert!(count(&outcome, "windows_kept") > 0, "{outcome}");
    assert!(reads(0) > 10 * reads(1), "{outcome}");
    let last = outcome.number("latency_bound.last_window_seconds");
    assert!(last.is_some() && last < Some(0.003), "{outcome}");
}

/// The file tier is as slow as an SSD that takes 80 us and more a page.
fn slow_loop(folder: &std::path::Path, bound: &str) -> Job {
    let spill = folder.join("spill").display().to_string();
    Job::new(build("touch"))
        .args(["24", "--rounds", "1000"])
        .limit(8 * MIB)
        .options(["--latency", bound, "--prefetch", "none"])
        .tier(&format!("file:{spill},size=64M,shape=nvme"))
}

#[test]
fn a_bound_that_no_tier_can_keep_is_refused_with_the_one_that_could_be_kept() {
    turn!(one_at_a_time, "a plain run has no bound");
    let folder = tempfile::tempdir().expect("a scratch folder");
    let refused = slow_loop(folder.path(), "p99=50us").run().expect(125);
    assert!(
        refused.errors.contains("p99=50us cannot be kept"),
        "{refused}"
    );
    assert!(refused.errors.contains("us could be kept"), "{refused}");
}

#[test]
fn a_bound_changes_while_the_program_runs() {
    turn!(one_at_a_time, "a plain run has no bound");
    let folder = tempfile::tempdir().expect("a scratch folder");
    let mut run = slow_loop(folder.path(), "p99=20s").start();
    let pid = run.pid().to_string();
    let set = |change: &str| Job::new(undercroft()).args(["set", &pid, change]).run();
    run.until("an answer", 30, |_| {
        (set("latency=p99=15s").code() == Some(0)).then_some(())
    });
    let refused = set("latency=p99=50us").expect(1);
    assert!(refused.errors.contains("us could be kept"), "{refused}");
    set("latency=none").expect(0);
    set("latency=p50=10s").expect(0);
    std::thread::sleep(std::time::Duration::from_secs(3));
    run.signal(rustix::process::Signal::TERM);
    let outcome = run.wait();
    let report = outcome.report.as_ref().expect("a report");
    assert_eq!(report["latency_bound"]["bound"], "p50=10s", "{outcome}");
    assert!(count(&outcome, "windows_kept") > 0, "{outcome}");
}

/// Sends one request, and returns the status and the body.
fn ask(stream: &mut (impl Read + Write), head: &str, body: &str) -> (u16, String) {
    let length = body.len();
    let text = format!("{head} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {length}\r\n");
    let text = format!("{text}Content-Type: application/json\r\n\r\n{body}");
    stream
        .write_all(text.as_bytes())
        .expect("it takes a request");
    let mut answer = String::new();
    stream.read_to_string(&mut answer).expect("it answers");
    let (head, body) = answer.split_once("\r\n\r\n").expect("a head");
    let status = head
        .split(' ')
        .nth(1)
        .and_then(|status| status.parse().ok());
    (status.expect("a status"), body.to_owned())
}

/// The page as a browser shows it after some seconds of its own time. `None`: no browser here.
fn page_in_browser(address: &str) -> Option<String> {
    let browser = find("chromium").or_else(|| find("chromium-browser"))?;
    let profile = tempfile::tempdir().expect("a scratch folder");
    let shown = Job::new(browser)
        .args(["--headless", "--no-sandbox", "--disable-gpu", "--dump-dom"])
        .arg("--virtual-time-budget=4000")
        .arg(format!("--user-data-dir={}", profile.path().display()))
        .arg(address)
        .run()
        .expect(0);
    Some(shown.text())
}

/// The address that `undercroft serve` prints.
fn address_of(server: &mut Running) -> String {
    let output = server.scratch().join("output");
    server.until("address", 30, |_| {
        let text = std::fs::read_to_string(&output).ok()?;
        let line = text.strip_suffix('\n')?;
        line.strip_prefix("Serving ").map(str::to_owned)
    })
}

/// `undercroft serve`, with these options.
fn serve(options: &[&str]) -> Job {
    Job::new(undercroft()).arg("serve").args(options)
}

/// Makes a request over TCP.
fn call(address: &str, head: &str, body: &str) -> (u16, String) {
    let port = address.trim_start_matches("http://").trim_end_matches('/');
    let mut stream = TcpStream::connect(port).expect("it takes calls");
    ask(&mut stream, head, body)
}

/// Changes the bound of a client over the socket, which no other user may use.
fn change_by_socket(path: &Path, client: &str) {
    let listen = format!("unix:{}", path.display());
    let mut server = serve(&["--listen", &listen, "--allow-changes"]).start();
    address_of(&mut server);
    let mode = std::fs::metadata(path).expect("a socket").permissions();
    assert_eq!(mode.mode() & 0o777, 0o600);
    let mut stream = UnixStream::connect(path).expect("it takes calls");
    let change = "{\"latency\":\"p99=15s\"}";
    let changed = ask(&mut stream, &format!("POST {client}"), change);
    assert_eq!(changed.0, 200, "{}", changed.1);
    server.signal(rustix::process::Signal::TERM);
    server.wait().expect(0);
    assert!(!path.exists(), "the socket is removed");
}

#[test]
fn the_server_shows_a_running_program_and_changes_it_by_its_unix_socket_alone() {
    turn!(one_at_a_time, "a plain run has no status");
    let folder = tempfile::tempdir().expect("a scratch folder");
    let mut run = slow_loop(folder.path(), "p99=20s").start();
    let pid = run.pid().to_string();
    serve(&["--listen", "0.0.0.0:0"]).run().expect(2);
    serve(&["--allow-changes"]).run().expect(2);
    let mut server = serve(&["--listen", "127.0.0.1:0"]).start();
    let address = address_of(&mut server);

    let client = format!("/v1/clients/{pid}");
    let get = |path: &str| call(&address, &format!("GET {path}"), "");
    let seen = run.until("page-ins", 30, |_| {
        let (status, body) = get(&client);
        let seen: serde_json::Value = serde_json::from_str(&body).expect("JSON");
        let reads = seen["faults"]["swap_in"].as_u64();
        (status == 200 && reads > Some(100)).then_some(seen)
    });
    assert_eq!(seen["memory_max_bytes"], 8 * MIB);
    let metrics = get("/metrics").1;
    let keeper = run.keeper();
    let emulated = format!("undercroft_tier_emulated{{pid=\"{keeper}\",command=\"touch");
    let line = metrics.lines().find(|line| line.starts_with(&emulated));
    let says_so = line.is_some_and(|line| line.ends_with("(emulated)\"} 1"));
    assert!(says_so, "{metrics}");

    let refused = call(&address, &format!("POST {client}"), "{\"latency\":null}");
    assert_eq!(refused.0, 403, "{}", refused.1);
    change_by_socket(&folder.path().join("socket"), &client);
    run.until("the bound", 10, |_| {
        get(&client).1.contains("p99=15s").then_some(())
    });

    run.until("pressure", 10, |_| {
        let line = get(&format!("{client}/pressure")).1;
        (line.starts_with("some avg10=") && !line.contains("avg10=0.00")).then_some(())
    });
    let status = Job::new(undercroft()).args(["status", &pid, "--pressure"]);
    assert!(status.run().expect(0).text().starts_with("some avg10="));
    match page_in_browser(&address) {
        Some(page) => assert!(
            page.contains("touch</button>")
                && page.contains(" · 3 arguments")
                && !page.contains("--rounds")
                && page.contains(">emulated<"),
            "{page}"
        ),
        None => skip("the page: chromium is not installed"),
    }
    server.signal(rustix::process::Signal::TERM);
    server.wait().expect(0);
    run.signal(rustix::process::Signal::TERM);
    run.wait();
}
