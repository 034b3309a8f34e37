//! Draws what `top` shows: the runs as a table, and the selected one with its tiers and graphs.

use std::ops::Add;

use ratatui::Frame;
use ratatui::layout::{Constraint, Layout, Rect};
use ratatui::style::Stylize;
use ratatui::widgets::{Block, Paragraph, Sparkline, TableState};
use undercroft_base::Bytes;
use undercroft_proto::report::{Snapshot, bound_summary};

use super::columns::{self, time};
use super::list::{HISTORY, List, Listed, Mode};

const KEYS: [&str; 7] = [
    " q quit",
    "h help",
    "/ filter",
    "space hold",
    "f s m p sort",
    "r reverse",
    "up/down select",
];

const HELP: &str = "\
q         leave
up, down  select a run (also k, j)
f         sort by faults
s         sort by stall
m         sort by memory
p         sort by process id
r         reverse the order
/         show only runs whose name, command,
          class or process id has a text;
          Enter keeps it, Esc drops it
space     hold the picture, or go on
h         this help

DRAM      memory, compressed pages too
OUT       pages that are out of memory
IN, OUT/s pages in and out in a second
STALL     time in which a thread waited
P99       of all faults since the start
BOUND     windows that kept it, of all

Columns that do not fit are left out.";

pub(super) fn draw(frame: &mut Frame<'_>, list: &mut List) {
    let width = frame.area().width;
    let facts = list.selected_at().map_or(Vec::new(), |at| {
        facts(&list.runs()[at].now, width.saturating_sub(2).into())
    });
    let below = facts.len() as u16 + 6;
    let [head, table, detail, foot] = Layout::vertical([
        Constraint::Length(1),
        Constraint::Min(4),
        Constraint::Length(below),
        Constraint::Length(1),
    ])
    .areas(frame.area());
    frame.render_widget(Paragraph::new(heading(list, width)).bold(), head);
    let keys = match list.mode {
        Mode::Filter => format!(" filter: {}_", list.filter()),
        _ => fitting(KEYS.map(str::to_owned), width),
    };
    frame.render_widget(Paragraph::new(keys).dim(), foot);
    if list.mode == Mode::Help {
        let all = table.union(detail);
        frame.render_widget(Paragraph::new(HELP).block(Block::bordered()), all);
        return;
    }
    if list.runs().is_empty() {
        let text = match (list.is_known(), list.filter()) {
            (false, _) => " Asking the runs ...",
            (true, "") => " Nothing runs under undercroft now.",
            (true, _) => " No run has this text; Esc shows all.",
        };
        frame.render_widget(Paragraph::new(text), table);
        return;
    }
    let mut state = TableState::new().with_selected(list.selected_at());
    let runs = columns::table(list.runs(), list.order(), width);
    frame.render_stateful_widget(runs, table, &mut state);
    if let Some(at) = list.selected_at() {
        selected(frame, detail, &list.runs()[at], facts);
    }
}

/// As many of the parts as fit whole.
fn fitting(parts: impl IntoIterator<Item = String>, width: u16) -> String {
    let parts: Vec<String> = parts.into_iter().filter(|part| !part.is_empty()).collect();
    flow(&parts, "   ", width.into()).swap_remove(0)
}

/// Lines of parts, none of which is cut unless it is longer than a line.
fn flow(parts: &[String], gap: &str, width: usize) -> Vec<String> {
    let mut lines = vec![String::new()];
    for part in parts {
        let last = lines.len() - 1;
        let line = &mut lines[last];
        let length = |text: &str| text.chars().count();
        if line.is_empty() {
            line.push_str(part);
        } else if length(line) + gap.len() + length(part) <= width {
            line.push_str(gap);
            line.push_str(part);
        } else {
            lines.push(part.clone());
        }
    }
    lines
}

fn heading(list: &List, width: u16) -> String {
    let sum = |of: fn(&Listed) -> f64| list.runs().iter().map(of).fold(0.0, Add::add);
    let dram = Bytes(sum(|run| run.now.dram_bytes as f64) as u64);
    let emulated = list.runs().iter().any(|run| is_emulated(&run.now));
    let when = |is: bool, word: &str| if is { word.to_owned() } else { String::new() };
    let parts = [
        format!(" {} runs", list.runs().len()),
        when(emulated, "emulated"),
        when(list.is_held(), "held"),
        when(
            !list.filter().is_empty(),
            &format!("with `{}`", list.filter()),
        ),
        format!("DRAM {dram}"),
        format!("{:.0} faults/s", sum(|run| run.rate().faults)),
    ];
    fitting(parts, width)
}

fn is_emulated(run: &Snapshot) -> bool {
    run.tiers.iter().any(|tier| tier.figures.emulated)
}

/// The newest figures, one for each column. * `scale`: what one is in the graph.
fn graph(run: &Listed, width: u16, scale: f64, of: impl Fn(&Listed, usize) -> f64) -> Vec<u64> {
    let count = run.rates.len().min(usize::from(width)).min(HISTORY);
    let first = run.rates.len() - count;
    (first..run.rates.len())
        .map(|at| (of(run, at) * scale).round() as u64)
        .collect()
}

fn selected(frame: &mut Frame<'_>, area: Rect, run: &Listed, facts: Vec<String>) {
    let now = &run.now;
    let block = Block::bordered().title(format!(" {}  {} ", now.pid, run.title()));
    let inner = block.inner(area);
    frame.render_widget(block, area);
    let [text, graphs] =
        Layout::vertical([Constraint::Length(facts.len() as u16), Constraint::Min(2)]).areas(inner);
    frame.render_widget(Paragraph::new(facts.join("\n")), text);
    let [faults, stall] =
        Layout::horizontal([Constraint::Percentage(50), Constraint::Percentage(50)]).areas(graphs);
    let rate = run.rate();
    let lines = [
        (
            faults,
            format!("faults/s  {:.0}", rate.faults),
            graph(run, faults.width, 1.0, |run, at| run.rates[at].faults),
        ),
        (
            stall,
            format!("stall  {:.1} %", rate.stall * 100.0),
            graph(run, stall.width, 1e4, |run, at| run.rates[at].stall),
        ),
    ];
    for (area, title, data) in &lines {
        let block = Block::new().title(title.as_str());
        frame.render_widget(Sparkline::default().block(block).data(data), *area);
    }
}

/// Facts of a run, in lines of this width.
fn facts(now: &Snapshot, width: usize) -> Vec<String> {
    let mut first = vec![format!("up {}", time(now.uptime_seconds))];
    first.extend(now.uid.map(|user| format!("user {user}")));
    first.extend(now.class.as_ref().map(|class| format!("class {class}")));
    first.extend([
        format!(
            "memory {}, {} at most, {} resident",
            Bytes(now.memory_bytes),
            Bytes(now.memory_bytes_peak),
            Bytes(now.resident_bytes)
        ),
        format!("{} faults", now.faults.total),
        format!(
            "policy {}, placement {}",
            now.policies.reclaim, now.policies.placement
        ),
    ]);
    let mut lines = flow(&first, "   ", width);
    for tier in &now.tiers {
        // The name comes last: only a name may be cut.
        lines.push(format!(
            "{} of pages in {}, ratio {}: {}",
            Bytes(tier.logical_bytes),
            Bytes(tier.held_bytes),
            tier.figures.ratio_text(),
            tier.figures.title(),
        ));
    }
    let latency = now.latency_bound.as_ref().map(bound_summary);
    let guest = now.guest.map(|guest| guest.line());
    for text in guest
        .into_iter()
        .chain(latency.map(|of| format!("bound {of}")))
    {
        let words: Vec<String> = text.split(' ').map(str::to_owned).collect();
        lines.extend(flow(&words, " ", width));
    }
    lines
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, Instant};

    use ratatui::Terminal;
    use ratatui::backend::TestBackend;

    use super::*;
    use crate::top::list::Order;
    use undercroft_proto::report::{GuestAccess, GuestMemory, TierSnapshot};

    /// A run as `status --json` gives it. `at`: seconds since its start.
    fn snapshot(pid: u32, at: f64, faults: u64, stall: f64) -> Snapshot {
        let text = include_str!("snapshot.json");
        let mut now: Snapshot = serde_json::from_str(text).expect("a snapshot");
        (now.pid, now.client_pid) = (pid, pid + 1);
        (now.uptime_seconds, now.faults.total, now.stall_some_seconds) = (at, faults, stall);
        now
    }

    fn screen(list: &mut List) -> String {
        screen_of(list, 120)
    }

    fn screen_of(list: &mut List, width: u16) -> String {
        let backend = TestBackend::new(width, 24);
        let mut terminal = Terminal::new(backend).expect("a terminal in memory");
        terminal.draw(|frame| draw(frame, list)).expect("drawn");
        terminal.backend().to_string()
    }

    /// Two looks, two seconds apart: run 100 has 500 faults a second, run 200 waits half of the
    /// time.
    fn two_looks() -> List {
        let mut list = List::new(Order::Faults);
        let now = Instant::now();
        list.update(
            now,
            vec![snapshot(100, 1.0, 10, 0.0), snapshot(200, 5.0, 10, 1.0)],
        );
        let later = now + Duration::from_secs(2);
        list.update(
            later,
            vec![snapshot(100, 3.0, 1010, 0.0), snapshot(200, 7.0, 20, 2.0)],
        );
        list
    }

    #[test]
    fn rates_are_those_between_two_looks_and_the_order_follows_them() {
        let mut list = two_looks();
        let pids =
            |list: &List| -> Vec<u32> { list.runs().iter().map(|run| run.now.pid).collect() };
        assert_eq!(list.runs()[0].rate().faults, 500.0);
        assert_eq!(list.runs()[1].rate().stall, 0.5);
        assert_eq!(pids(&list), [100, 200]);
        list.sort_by(Order::Stall);
        assert_eq!(pids(&list), [200, 100]);
        list.reverse();
        assert_eq!(pids(&list), [100, 200]);
        list.sort_by(Order::Pid);
        assert_eq!(pids(&list), [100, 200]);
    }

    #[test]
    fn picture_shows_both_runs_the_selected_one_and_what_is_emulated() {
        let mut list = two_looks();
        let text = screen(&mut list);
        for part in [
            "2 runs",
            "505 faults/s",
            "redis-server",
            "emulated",
            "ratio",
            "stall",
            "100",
        ] {
            assert!(text.contains(part), "no `{part}` in\n{text}");
        }
        assert!(text.contains(" 50 %"), "{text}");
        list.select(1);
        assert_eq!(list.selected_at(), Some(1));
        list.select(5);
        assert_eq!(list.selected_at(), Some(1), "there is no more");
    }

    /// A run with the longest figures.
    fn large(at: f64, faults: u64) -> Snapshot {
        let mut now = snapshot(4_194_304, at, faults, at * 0.9);
        now.dram_bytes = (1023 << 30) + (900 << 20);
        now.memory_max_bytes = Some(1023 << 20);
        now.command = vec!["/usr/lib/postgresql/16/bin/postgres".to_owned()];
        now.pages.swapped_in = faults * 3;
        now.pages.swapped_out = faults * 2;
        let tiers = [
            ("ram", 1000u64 << 20),
            ("file:/var/lib/undercroft/swap", 24 << 30),
        ];
        let tier = now.tiers[0].clone();
        let tier = tiers.map(|(name, bytes)| {
            let mut tier: TierSnapshot = tier.clone();
            tier.figures.name = name.to_owned();
            (tier.logical_bytes, tier.held_bytes) = (bytes, bytes);
            tier
        });
        now.tiers = tier.to_vec();
        let times = now.fault_latency_seconds.as_mut().expect("times");
        times.p99 = 0.0559;
        let bound = now.latency_bound.as_mut().expect("a bound");
        (bound.windows_kept, bound.windows_missed) = (86_000, 400);
        now
    }

    #[test]
    fn columns_leave_by_width_no_number_is_cut_and_the_command_gets_the_rest() {
        let all = [
            ("PID", "4194304"),
            ("DRAM", "1023.9 GiB"),
            ("LIMIT", "1023.0 MiB"),
            ("STALL", "90 %"),
            ("FAULTS/s", "500000"),
            ("OUT", "25.0 GiB"),
            ("P99", "55.9 ms"),
            ("BOUND", "86000/86400"),
            ("IN/s", "1500000"),
            ("OUT/s", "1000000"),
        ];
        for (width, shown, command) in [
            (60, 5, "/usr/lib/postgr"),
            (80, 7, "/usr/lib/postgresq"),
            (120, 10, "/usr/lib/postgresql/16/bin/pos"),
            (200, 10, "/usr/lib/postgresql/16/bin/postgres"),
        ] {
            let mut list = List::new(Order::Faults);
            list.update(Instant::now(), vec![large(1.0, 0)]);
            list.update(Instant::now(), vec![large(3.0, 1_000_000)]);
            let text = screen_of(&mut list, width);
            let lines: Vec<&str> = text.lines().collect();
            let words = |at: usize| lines[at].trim_matches('"').split_whitespace();
            let titles: Vec<&str> = words(1).collect();
            for (at, (title, number)) in all.iter().enumerate() {
                let there = titles.contains(title);
                assert_eq!(there, at < shown, "{title} at {width}\n{text}");
                assert_eq!(
                    lines[2].contains(number),
                    there,
                    "{title} at {width}\n{text}"
                );
            }
            assert!(lines[2].contains(command), "{width}\n{text}");
            for part in [
                "1000.0 MiB of pages in 1000.0 MiB, ratio",
                "24.0 GiB of pages in 24.0 GiB, ratio",
                "1000000 faults",
                "q quit   h help   / filter",
            ] {
                assert!(text.contains(part), "no `{part}` at {width}\n{text}");
            }
        }
    }

    #[test]
    fn a_filter_shows_the_runs_that_have_its_text_and_says_so() {
        let mut list = two_looks();
        let mut other = snapshot(300, 5.0, 10, 0.0);
        other.command = vec!["/usr/bin/Python3".to_owned()];
        other.class = Some("batch".to_owned());
        other.name = Some("nightly".to_owned());
        let looks = vec![snapshot(100, 4.0, 1010, 0.0), other.clone()];
        list.update(Instant::now(), looks);
        for text in ["python", "batch", "300", "nightly"] {
            list.set_filter(text.to_owned());
            let picture = screen(&mut list);
            assert!(picture.contains("1 runs") && picture.contains(&format!("with `{text}`")));
            assert!(picture.contains("nightly: /usr/bin/Python3"), "{picture}");
            assert!(!picture.contains("redis-server"), "{picture}");
            assert_eq!(list.selected_at(), Some(0));
        }
        list.set_filter("perl".to_owned());
        assert!(screen(&mut list).contains("No run has this text"));
        list.update(Instant::now(), vec![other]);
        list.set_filter(String::new());
        assert_eq!(list.runs().len(), 1);
    }

    #[test]
    fn help_names_every_key_and_fits_into_60_columns() {
        let mut list = two_looks();
        list.mode = Mode::Help;
        let text = screen_of(&mut list, 60);
        for line in HELP.lines().take(18) {
            assert!(text.contains(line), "no `{line}` in\n{text}");
        }
    }

    #[test]
    fn class_of_a_run_of_the_daemon_is_shown() {
        let mut list = List::new(Order::Faults);
        let class = Some("batch".to_owned());
        let now = Snapshot {
            class,
            ..snapshot(100, 1.0, 10, 0.0)
        };
        list.update(Instant::now(), vec![now]);
        assert!(screen(&mut list).contains("class batch"));
        list.update(Instant::now(), vec![snapshot(100, 2.0, 10, 0.0)]);
        assert!(!screen(&mut list).contains("class"));
    }

    #[test]
    fn memory_of_a_virtual_machine_is_shown_and_not_cut() {
        let guest = Some(GuestMemory {
            bytes: 160 << 20,
            resident_bytes: 60 << 20,
            stored_bytes: 90 << 20,
            given_back_bytes: 30 << 20,
            huge_pages_short: None,
            locked_bytes: 0,
            locks_ignored: 0,
            handed_over: None,
            views: 0,
            access: GuestAccess::Scanned,
        });
        for width in [60, 120] {
            let mut list = List::new(Order::Faults);
            let now = Snapshot {
                guest,
                ..snapshot(100, 1.0, 10, 0.0)
            };
            list.update(Instant::now(), vec![now]);
            let text = screen_of(&mut list, width);
            let words = |text: &str| -> String {
                let letters = text.chars().filter(|of| !"\"│".contains(*of));
                let text: String = letters.collect();
                text.split_whitespace().collect::<Vec<_>>().join(" ")
            };
            let expected = "virtual machine 160.0 MiB: 60.0 MiB in memory, 90.0 MiB in tiers; \
                            30.0 MiB given back so far";
            assert!(words(&text).contains(expected), "{width}\n{text}");
        }
        assert!(!screen(&mut two_looks()).contains("virtual machine"));
    }

    #[test]
    fn run_that_ends_goes_and_another_is_selected() {
        let mut list = two_looks();
        list.select(1);
        list.update(Instant::now(), vec![snapshot(100, 4.0, 1010, 0.0)]);
        assert_eq!(list.selected_at(), Some(0));
        list.hold();
        list.update(Instant::now(), Vec::new());
        assert_eq!(list.runs().len(), 1, "held");
        list.hold();
        list.update(Instant::now(), Vec::new());
        assert!(screen(&mut list).contains("Nothing runs"));
    }

    /// A terminal of any size is no reason to panic, and no history outgrows its bound.
    #[test]
    fn small_terminals_and_long_runs_are_drawn() {
        let mut list = List::new(Order::Faults);
        for at in 0..200u32 {
            let (seconds, faults) = (f64::from(at), u64::from(at) * 100);
            list.update(
                Instant::now(),
                vec![snapshot(100, seconds, faults, seconds / 3.0)],
            );
        }
        assert_eq!(list.runs()[0].rates.len(), HISTORY);
        for (width, height) in [(1, 1), (20, 4), (40, 10), (300, 100)] {
            let backend = TestBackend::new(width, height);
            let mut terminal = Terminal::new(backend).expect("a terminal in memory");
            terminal
                .draw(|frame| draw(frame, &mut list))
                .expect("drawn");
        }
    }
}
