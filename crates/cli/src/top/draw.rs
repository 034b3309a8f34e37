//! Draws what `top` shows: the runs as a table, and the selected one with its tiers and graphs.

use std::ops::Add;

use ratatui::Frame;
use ratatui::layout::{Constraint, Layout, Rect};
use ratatui::style::{Modifier, Style, Stylize};
use ratatui::text::Line;
use ratatui::widgets::{Block, Cell, Paragraph, Row, Sparkline, Table, TableState};
use undercroft_base::{Bytes, Nanos};
use undercroft_proto::report::{Snapshot, bound_summary};

use super::list::{HISTORY, List, Listed, Order};

const KEYS: &str =
    " q quit   up/down select   f faults  s stall  m memory  p pid   r reverse   space hold";

pub(super) fn draw(frame: &mut Frame<'_>, list: &mut List) {
    let tiers = list
        .selected_at()
        .map_or(0, |at| list.runs()[at].now.tiers.len());
    let below = 9 + tiers as u16;
    let [head, table, detail, foot] = Layout::vertical([
        Constraint::Length(1),
        Constraint::Min(4),
        Constraint::Length(below),
        Constraint::Length(1),
    ])
    .areas(frame.area());
    frame.render_widget(Paragraph::new(heading(list)).bold(), head);
    frame.render_widget(Paragraph::new(KEYS).dim(), foot);
    if list.runs().is_empty() {
        let text = if list.is_known() {
            " Nothing runs under undercroft now."
        } else {
            " Asking the runs ..."
        };
        frame.render_widget(Paragraph::new(text), table);
        return;
    }
    runs(frame, table, list);
    if let Some(at) = list.selected_at() {
        selected(frame, detail, &list.runs()[at]);
    }
}

fn heading(list: &List) -> String {
    let sum = |of: fn(&Listed) -> f64| list.runs().iter().map(of).fold(0.0, Add::add);
    let dram = Bytes(sum(|run| run.now.dram_bytes as f64) as u64);
    let emulated = list.runs().iter().any(|run| is_emulated(&run.now));
    format!(
        " undercroft   {} runs   DRAM {dram}   {:.0} faults/s{}{}",
        list.runs().len(),
        sum(|run| run.rate().faults),
        if emulated { "   emulated" } else { "" },
        if list.is_held() { "   held" } else { "" },
    )
}

fn is_emulated(run: &Snapshot) -> bool {
    run.tiers.iter().any(|tier| tier.figures.emulated)
}

fn title(text: &'static str, order: Order, of: Order) -> Cell<'static> {
    let cell = Cell::from(text);
    if order == of { cell.underlined() } else { cell }
}

fn runs(frame: &mut Frame<'_>, area: Rect, list: &List) {
    let order = list.order();
    let header = Row::new([
        title("PID", order, Order::Pid),
        title("DRAM", order, Order::Memory),
        Cell::from("LIMIT"),
        Cell::from("OUT"),
        title("FAULTS/s", order, Order::Faults),
        Cell::from("IN/s"),
        Cell::from("OUT/s"),
        title("STALL", order, Order::Stall),
        Cell::from("P99"),
        Cell::from("BOUND"),
        Cell::from("COMMAND"),
    ]);
    let widths = [
        Constraint::Length(8),
        Constraint::Length(10),
        Constraint::Length(10),
        Constraint::Length(10),
        Constraint::Length(9),
        Constraint::Length(8),
        Constraint::Length(8),
        Constraint::Length(8),
        Constraint::Length(9),
        Constraint::Length(10),
        Constraint::Min(10),
    ];
    let table = Table::new(list.runs().iter().map(row), widths)
        .header(header.style(Style::new().add_modifier(Modifier::BOLD)))
        .row_highlight_style(Style::new().add_modifier(Modifier::REVERSED));
    let mut state = TableState::new().with_selected(list.selected_at());
    frame.render_stateful_widget(table, area, &mut state);
}

fn row(run: &Listed) -> Row<'static> {
    let (now, rate) = (&run.now, run.rate());
    let limit = match now.memory_max_bytes {
        _ if now.paused => "paused".to_owned(),
        Some(max) => Bytes(max).to_string(),
        None => "-".to_owned(),
    };
    let out: u64 = now.tiers.iter().map(|tier| tier.logical_bytes).sum();
    let p99 = now.fault_latency_seconds.as_ref();
    let latency = now.latency_bound.as_ref();
    let latency = latency.map(|bound| (bound.windows_kept, bound.windows_missed));
    let stall = now.stall_bound.as_ref();
    let windows = latency.or(stall.map(|bound| (bound.windows_kept, bound.windows_missed)));
    Row::new([
        now.pid.to_string(),
        Bytes(now.dram_bytes).to_string(),
        limit,
        Bytes(out).to_string(),
        format!("{:.0}", rate.faults),
        format!("{:.0}", rate.pages_in),
        format!("{:.0}", rate.pages_out),
        match stall {
            Some(of) => format!("{:.0}/{}", rate.stall * 100.0, of.bound),
            None => format!("{:.0} %", rate.stall * 100.0),
        },
        p99.map_or("-".to_owned(), |of| time(of.p99)),
        windows.map_or("-".to_owned(), |(kept, missed)| {
            format!("{kept}/{}", kept + missed)
        }),
        now.command_line(),
    ])
}

fn time(seconds: f64) -> String {
    Nanos((seconds * 1e9) as u64).to_string()
}

/// The newest figures, one for each column. * `scale`: what one is in the graph.
fn graph(run: &Listed, width: u16, scale: f64, of: impl Fn(&Listed, usize) -> f64) -> Vec<u64> {
    let count = run.rates.len().min(usize::from(width)).min(HISTORY);
    let first = run.rates.len() - count;
    (first..run.rates.len())
        .map(|at| (of(run, at) * scale).round() as u64)
        .collect()
}

fn selected(frame: &mut Frame<'_>, area: Rect, run: &Listed) {
    let now = &run.now;
    let block = Block::bordered().title(format!(" {}  {} ", now.pid, now.command_line()));
    let inner = block.inner(area);
    frame.render_widget(block, area);
    let [text, graphs] = Layout::vertical([
        Constraint::Length(3 + now.tiers.len() as u16),
        Constraint::Min(2),
    ])
    .areas(inner);
    frame.render_widget(Paragraph::new(facts(now)), text);
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
            match &now.stall_bound {
                Some(of) => format!("stall  {:.1} % of {}", rate.stall * 100.0, of.bound),
                None => format!("stall  {:.1} %", rate.stall * 100.0),
            },
            graph(run, stall.width, 1e4, |run, at| run.rates[at].stall),
        ),
    ];
    for (area, title, data) in &lines {
        let block = Block::new().title(title.as_str());
        frame.render_widget(Sparkline::default().block(block).data(data), *area);
    }
}

fn facts(now: &Snapshot) -> Vec<Line<'static>> {
    let mut lines = vec![Line::from(format!(
        "up {}{}   resident {}   {} faults   policy {}, placement {}",
        time(now.uptime_seconds),
        (now.class.as_ref()).map_or(String::new(), |class| format!("   class {class}")),
        Bytes(now.resident_bytes),
        now.faults.total,
        now.policies.reclaim,
        now.policies.placement,
    ))];
    for tier in &now.tiers {
        let ratio = tier.figures.ratio_text();
        lines.push(Line::from(format!(
            "{}: {} of pages in {}, ratio {ratio}",
            tier.figures.title(),
            Bytes(tier.logical_bytes),
            Bytes(tier.held_bytes),
        )));
    }
    if let Some(bound) = &now.latency_bound {
        lines.push(Line::from(format!("bound {}", bound_summary(bound))));
    }
    if let Some(bound) = &now.stall_bound {
        lines.push(Line::from(format!("bound {bound}")));
    }
    lines
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, Instant};

    use ratatui::Terminal;
    use ratatui::backend::TestBackend;

    use super::*;
    use undercroft_proto::report::StallBoundReport;

    /// A run as `status --json` gives it. `at`: seconds since its start.
    fn snapshot(pid: u32, at: f64, faults: u64, stall: f64) -> Snapshot {
        let text = include_str!("snapshot.json");
        let mut now: Snapshot = serde_json::from_str(text).expect("a snapshot");
        (now.pid, now.client_pid) = (pid, pid + 1);
        (now.uptime_seconds, now.faults.total, now.stall_some_seconds) = (at, faults, stall);
        now
    }

    fn screen(list: &mut List) -> String {
        let mut terminal = Terminal::new(TestBackend::new(120, 24)).expect("a terminal in memory");
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
    fn a_stall_bound_is_shown_beside_the_stall() {
        let mut list = two_looks();
        let with_bound = |at: f64, stall: f64| Snapshot {
            latency_bound: None,
            stall_bound: Some(StallBoundReport {
                bound: "30%".to_owned(),
                ratio: 0.248,
                windows_kept: 5,
                windows_missed: 2,
                shift: 3.5,
            }),
            ..snapshot(200, at, 20, stall)
        };
        let now = Instant::now();
        list.update(now, vec![with_bound(9.0, 3.0)]);
        list.update(now, vec![with_bound(11.0, 4.0)]);
        let text = screen(&mut list);
        for part in [
            "50/30%",
            "5/7",
            "stall  50.0 % of 30%",
            "stall 30%: waits 24.8% of the time; kept in 5 of 7 windows",
        ] {
            assert!(text.contains(part), "no `{part}` in\n{text}");
        }
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
