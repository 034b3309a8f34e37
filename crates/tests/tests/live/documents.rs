//! Every command of README and guide runs. A block of code without a name of a language is
//! commands: all its lines, or those after `$ `. No other block has any. Commands in a sentence,
//! which are rarely whole, have subcommands and options that there are.

use std::collections::BTreeSet;
use std::fs;
use std::os::unix::net::UnixDatagram;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use undercroft_tests::{
    Job, Running, beside_others, build, find, skip, turn, undercroft, undercroft_lab,
};

/// Commands that begin so do not run here, and why. Each row must be used.
const NOT_HERE: [(&str, &str); 20] = [
    (
        "cargo run --release -- demo",
        "it takes minutes; tests of the command line run it shorter",
    ),
    ("cargo xtask test", "it runs this test"),
    (
        "undercroft vm --name web",
        "there is no such disk; `vm_back_ends.rs` has one",
    ),
    ("undercroft view", "it is a view of that machine"),
    ("sudo packaging/try-deb", "`packaging.rs` runs it"),
    ("packaging/build", "`packaging.rs` runs it"),
    (
        "sudo apt install",
        "`packaging.rs` installs the package in a system of its own",
    ),
    ("sudo usermod", "it changes this machine"),
    (
        "sudo setpriv",
        "it names a user of the reader's; `rights.rs` runs as another user",
    ),
    (
        "setpriv",
        "it names a user of the reader's; `rights.rs` runs as another user",
    ),
    ("groupadd", "it changes this machine"),
    ("echo 'KERNEL", "it changes this machine"),
    ("udevadm", "it changes this machine"),
    (
        "podman",
        "`packaging.rs` runs the image with runc, with the same rights",
    ),
    ("systemd-run", "systemd runs on no machine of these tests"),
    (
        "undercroft top",
        "it needs a terminal; tests of the command line give it one",
    ),
    (
        "undercroft run -m 1G --tier ram --tier redis:",
        "`remote.rs` makes clusters",
    ),
    (
        "undercroft-lab run scale",
        "it takes minutes; `lab.rs` runs it smaller",
    ),
    (
        "undercroft-lab storm --seeds 2000",
        "it takes minutes; the next one is shorter",
    ),
    (
        "undercroft-lab storm --replay",
        "no storm fails, so there is no file",
    ),
];

/// Commands with such a word go on until they are stopped, and must run after two seconds; so do
/// those with `&`.
const SERVERS: [&str; 2] = ["-- redis-server", "undercroft serve"];

/// Stand-ins for names in the documents. `@` is the folder in which the commands run,
/// `PID` the process id of a run.
const STAND_INS: [(&str, &str); 11] = [
    ("file:/var/swap", "file:@/swap"),
    // Two files here are on one device, which such a run refuses.
    ("file:/ssd,size=9G", "file:@/ssd,size=9G,shape=sata-ssd"),
    ("file:/disk,size=9G", "file:@/disk,size=9G,shape=hdd-7200"),
    ("/run/undercroft.sock", "@/undercroft.sock"),
    ("/etc/undercroft.token", "@/undercroft.token"),
    // It ends with 0 whatever the server says.
    ("curl ", "curl --silent --show-error --fail "),
    ("4711", "PID"),
    ("--out DIR", "--out @/out"),
    // As much as a reader wants to see takes long.
    ("refs=2000000", "refs=100000"),
    ("refs=1e6", "refs=1e5"),
    ("--port 7001", "--port 0 --unixsocket @/redis.sock"),
];

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// The pages, without the one that is made from the command line's definitions.
fn pages() -> Vec<PathBuf> {
    let guide = fs::read_dir(root().join("docs/guide")).expect("the guide");
    let guide = guide.map(|file| file.expect("a file").path());
    let mut pages: Vec<PathBuf> = guide
        .filter(|path| path.extension().is_some_and(|kind| kind == "md"))
        .collect();
    pages.push(root().join("README.md"));
    pages.sort();
    pages
}

/// The blocks of a page: name of the language, and lines.
fn blocks(text: &str) -> Vec<(String, Vec<&str>)> {
    let mut blocks = Vec::new();
    let mut lines = text.lines();
    while let Some(line) = lines.next() {
        if let Some(language) = line.strip_prefix("```") {
            let inner = lines.by_ref().take_while(|line| *line != "```");
            blocks.push((language.trim().to_owned(), inner.collect()));
        }
    }
    blocks
}

/// The commands of a page, each on one line.
fn commands(text: &str) -> Vec<String> {
    let mut found: Vec<String> = Vec::new();
    for (language, lines) in blocks(text) {
        if !language.is_empty() {
            continue;
        }
        let has_output = lines.iter().any(|line| line.starts_with("$ "));
        let mut goes_on = false;
        for line in lines {
            let command = line.strip_prefix("$ ");
            let whole = line.trim_start();
            if goes_on {
                let last = found.last_mut().expect("it began");
                last.truncate(last.len() - 1);
                last.push_str(whole);
            } else if let Some(command) =
                command.or((!has_output && !whole.is_empty()).then_some(whole))
            {
                found.push(command.to_owned());
            } else {
                continue;
            }
            goes_on = line.ends_with('\\');
        }
    }
    found
}

/// A folder with the files and programs that the documents name.
struct Place {
    folder: tempfile::TempDir,
    path: String,
    /// The run that has the process id of the page's commands.
    client: Option<Running>,
    /// Commands that go on until the page ends.
    running: Vec<Running>,
}

impl Place {
    fn new() -> Place {
        let folder = tempfile::tempdir().expect("a scratch folder");
        let at = |name: &str| folder.path().join(name);
        for name in ["bin", "ssd", "disk", "run"] {
            fs::create_dir(at(name)).expect("a folder");
        }
        let link = |from: &Path, name: &str| {
            std::os::unix::fs::symlink(from, at("bin").join(name)).expect("a link");
        };
        link(undercroft(), "undercroft");
        link(undercroft_lab(), "undercroft-lab");
        link(Path::new("/bin/true"), "CMD");
        let job = "import time\nall = [bytes([n % 256]) * 4096 for n in range(24000)]\nend = time.time() + 3\n\
                   while time.time() < end:\n    assert all[int(time.time() * 1000) % 24000][7] < 256\n";
        fs::write(at("job.py"), job).expect("a program");
        fs::write(at("big.c"), "int main(void) { return 0; }\n").expect("a source");
        fs::write(at("big.txt"), "b\na\n".repeat(100_000)).expect("lines");
        fs::write(at("Makefile"), "all:\n\ttrue\n").expect("a makefile");
        fs::copy(
            root().join("packaging/undercroft.toml"),
            at("undercroft.toml"),
        )
        .expect("a copy");
        let path = format!(
            "{}:{}",
            at("bin").display(),
            std::env::var("PATH").unwrap_or_default()
        );
        Place {
            folder,
            path,
            client: None,
            running: Vec::new(),
        }
    }

    fn job(&self, command: &str) -> Job {
        Job::new("bash")
            .args(["-c", command])
            .folder(self.folder.path())
            .env("PATH", &self.path)
            .env("UNDERCROFT_DIR", self.folder.path().join("run"))
            .timeout(120)
    }

    /// The command as it runs here.
    fn translated(&mut self, command: &str) -> String {
        let mut command = command.to_owned();
        for (from, to) in STAND_INS {
            let to = to.replace('@', &self.folder.path().display().to_string());
            command = command.replace(from, &to);
        }
        if command.contains("PID") {
            command = command.replace("PID", &self.client());
        }
        command
    }

    /// The process id of a run that goes on. It is started when a page names one first.
    fn client(&mut self) -> String {
        if self.client.is_none() {
            let program = build("touch").display().to_string();
            let command = format!("exec undercroft run -q -m 32M -- {program} 64 --rounds 1000000");
            let mut client = self.job(&command).start();
            let folder = self.folder.path().join("run");
            client.until("pages out", 30, |run| {
                let status = Command::new(undercroft())
                    .args(["status", "--json"])
                    .env("UNDERCROFT_DIR", &folder)
                    .output();
                let status: serde_json::Value =
                    serde_json::from_slice(&status.ok()?.stdout).ok()?;
                let mut clients = status["clients"].as_array()?.iter();
                let ours = clients.find(|it| it["pid"] == run.keeper())?;
                (ours["pages"]["swapped_out"].as_u64()? > 0).then_some(())
            });
            self.client = Some(client);
        }
        let client = self.client.as_ref().expect("it was started");
        client.keeper().to_string()
    }

    fn go_on(&mut self, command: &str) {
        let mut running = self.job(&format!("exec {command}")).start();
        std::thread::sleep(Duration::from_secs(2));
        assert!(
            running.is_alive(),
            "`{command}` ended: {}",
            running.outcome()
        );
        self.running.push(running);
    }
}

#[test]
fn every_command_of_readme_and_guide_runs() {
    turn!(beside_others, "the documents are about undercroft");
    for program in [
        "redis-server",
        "valgrind",
        "openssl",
        "curl",
        "python3",
        "gcc",
        "make",
        "clang",
        "wasm-ld",
    ] {
        if find(program).is_none() {
            return skip(&format!(
                "{program}, which documents name, is not installed"
            ));
        }
    }
    let mut used = BTreeSet::new();
    let mut ran = 0;
    for page in pages() {
        let text = fs::read_to_string(&page).expect("a page");
        let mut place = Place::new();
        for command in commands(&text) {
            let row = NOT_HERE
                .iter()
                .position(|(start, _)| command.starts_with(start));
            if let Some(row) = row {
                used.insert(row);
                continue;
            }
            println!("{}: {command}", page.display());
            let here = place.translated(&command);
            let plain = here.split(" #").next().unwrap_or(&here).trim();
            ran += 1;
            if let Some(command) = plain.strip_suffix('&') {
                place.go_on(command.trim());
            } else if SERVERS.iter().any(|word| plain.contains(word)) {
                place.go_on(plain);
            } else {
                place.job(&here).run().expect(0);
            }
        }
    }
    assert!(ran > 25, "only {ran} commands were found");
    let stale = (0..NOT_HERE.len()).find(|row| !used.contains(row));
    let stale = stale.map(|row| NOT_HERE[row].0);
    assert_eq!(stale, None, "no document has this command any more");
}

/// Languages of blocks that have no commands.
const LANGUAGES: [&str; 3] = ["c", "ini", "text"];

/// Commands in sentences: quoted text that begins with the name of one of our programs, with one
/// blank between words.
fn in_sentences(text: &str) -> Vec<String> {
    let mut prose = String::new();
    let mut is_code = false;
    for line in text.lines() {
        is_code ^= line.starts_with("```");
        if !is_code && !line.starts_with("```") {
            prose.extend([line, " "]);
        }
    }
    let quoted = prose.split('`').skip(1).step_by(2);
    let words = quoted.map(|text| text.split_whitespace().collect::<Vec<_>>().join(" "));
    let ours = ["undercroft ", "undercroft-lab "];
    words
        .filter(|text| ours.iter().any(|name| text.starts_with(name)))
        .collect()
}

/// Whether each subcommand and option of a command in a sentence is one that there is; otherwise
/// the part that is not.
fn unknown(command: &str, options: &str) -> Option<String> {
    let mut words = command.split(' ').peekable();
    let name = words.next().expect("a name");
    let program = if name == "undercroft" {
        undercroft()
    } else {
        undercroft_lab()
    };
    let mut above: Vec<&str> = Vec::new();
    let is_word = |word: &&str| word.bytes().all(|byte| byte.is_ascii_lowercase());
    while let Some(word) = words.next_if(is_word) {
        above.push(word);
    }
    let help = Job::new(program).args(&above).arg("--help").run();
    if help.code() != Some(0) {
        return Some(above.join(" "));
    }
    let known = help.text() + options;
    let ours = words.take_while(|word| *word != "--");
    let mut named = ours.filter(|word| word.starts_with('-'));
    let unknown = named.find(|word| !known.contains(word.split('=').next().unwrap_or(word)));
    unknown.map(str::to_owned)
}

#[test]
fn commands_in_sentences_name_what_there_is() {
    turn!(beside_others, "the documents are about undercroft");
    let options = fs::read_to_string(root().join("docs/guide/options.md")).expect("a page");
    let mut found = BTreeSet::new();
    for page in pages() {
        let text = fs::read_to_string(&page).expect("a page");
        for (language, _) in blocks(&text) {
            let is_known = language.is_empty() || LANGUAGES.contains(&language.as_str());
            assert!(is_known, "{}: {language}", page.display());
        }
        found.extend(in_sentences(&text).into_iter().map(|it| (it, page.clone())));
    }
    let wrong: Vec<_> = found
        .iter()
        .filter_map(|(command, page)| Some((page, command, unknown(command, &options)?)))
        .collect();
    assert!(wrong.is_empty(), "{wrong:?}");
    assert!(found.len() > 50, "only {} were found", found.len());
}

/// The units of the guide, each as a file of its own.
#[test]
fn units_of_the_guide_are_clean_for_systemd() {
    let _turn = beside_others();
    if find("systemd-analyze").is_none() {
        return skip("systemd-analyze is not installed");
    }
    let mut found = 0;
    for page in pages() {
        let text = fs::read_to_string(&page).expect("a page");
        for (language, lines) in blocks(&text) {
            if language != "ini" {
                continue;
            }
            let scratch = tempfile::tempdir().expect("a scratch folder");
            let unit = scratch.path().join("program.service");
            let ours = undercroft().display().to_string();
            let lines = lines.join("\n").replace("/usr/bin/undercroft", &ours);
            fs::write(&unit, lines.replace("/usr/bin/redis-server", "/bin/true")).expect("a unit");
            let verify = Job::new("systemd-analyze").args(["verify", "--man=no"]);
            let told = verify.arg(&unit).run().expect(0);
            assert_eq!((told.text().as_str(), told.errors.as_str()), ("", ""));
            found += 1;
        }
    }
    assert!(found > 0, "the guide has units");
}

/// `NotifyAccess=all` is for this: the program itself tells systemd that it is ready.
#[test]
fn program_tells_its_service_manager_that_it_is_ready() {
    turn!(beside_others, "it is about `undercroft run`");
    if find("systemd-notify").is_none() {
        return skip("systemd-notify is not installed");
    }
    let scratch = tempfile::tempdir().expect("a scratch folder");
    let path = scratch.path().join("notify");
    let socket = UnixDatagram::bind(&path).expect("a socket");
    socket
        .set_read_timeout(Some(Duration::from_secs(30)))
        .expect("a time limit");
    let run = Job::new(undercroft())
        .args([
            "run",
            "-q",
            "-m",
            "64M",
            "--",
            "systemd-notify",
            "--ready",
            "--no-block",
        ])
        .env("NOTIFY_SOCKET", &path)
        .start();
    let mut message = [0; 256];
    let length = socket.recv(&mut message).expect("a message");
    let message = String::from_utf8_lossy(&message[..length]);
    assert!(message.contains("READY=1"), "{message}");
    run.wait().expect(0);
}
