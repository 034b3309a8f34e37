//! The table of runs: which columns fit into a width, and how wide each is. A column that does not
//! fit whole is left out; no number is cut. The command gets what is left.

use ratatui::layout::Constraint;
use ratatui::style::{Modifier, Style, Stylize};
use ratatui::text::Line;
use ratatui::widgets::{Cell, Row, Table};
use undercroft_base::{Bytes, Nanos};

use super::list::{Listed, Order};

/// Least room for the command.
const COMMAND_WIDTH_MIN: usize = 12;

/// A column of numbers.
struct Column {
    title: &'static str,
    /// The order that sorts by it.
    order: Option<Order>,
    /// The highest leaves first where there is no room.
    rank: u8,
    text: fn(&Listed) -> String,
}

const COLUMNS: [Column; 10] = [
    Column {
        title: "PID",
        order: Some(Order::Pid),
        rank: 0,
        text: |run| run.now.pid.to_string(),
    },
    Column {
        title: "DRAM",
        order: Some(Order::Memory),
        rank: 1,
        text: |run| Bytes(run.now.dram_bytes).to_string(),
    },
    Column {
        title: "LIMIT",
        order: None,
        rank: 2,
        text: |run| match run.now.memory_max_bytes {
            _ if run.now.paused => "paused".to_owned(),
            Some(max) => Bytes(max).to_string(),
            None => "-".to_owned(),
        },
    },
    Column {
        title: "OUT",
        order: None,
        rank: 5,
        text: |run| {
            let out = run.now.tiers.iter().map(|tier| tier.logical_bytes);
            Bytes(out.sum()).to_string()
        },
    },
    Column {
        title: "FAULTS/s",
        order: Some(Order::Faults),
        rank: 4,
        text: |run| format!("{:.0}", run.rate().faults),
    },
    Column {
        title: "IN/s",
        order: None,
        rank: 8,
        text: |run| format!("{:.0}", run.rate().pages_in),
    },
    Column {
        title: "OUT/s",
        order: None,
        rank: 9,
        text: |run| format!("{:.0}", run.rate().pages_out),
    },
    Column {
        title: "STALL",
        order: Some(Order::Stall),
        rank: 3,
        text: |run| format!("{:.0} %", run.rate().stall * 100.0),
    },
    Column {
        title: "P99",
        order: None,
        rank: 6,
        text: |run| {
            let times = run.now.fault_latency_seconds.as_ref();
            times.map_or("-".to_owned(), |of| time(of.p99))
        },
    },
    Column {
        title: "BOUND",
        order: None,
        rank: 7,
        text: |run| {
            let latency = run.now.latency_bound.as_ref();
            let latency = latency.map(|bound| (bound.windows_kept, bound.windows_missed));
            latency.map_or("-".to_owned(), |(kept, missed)| {
                format!("{kept}/{}", kept + missed)
            })
        },
    },
];

/// The runs as a table of at most `width` columns of the terminal.
pub(super) fn table(runs: &[Listed], order: Order, width: u16) -> Table<'static> {
    let columns = fitting(runs, width.into());
    let titles = columns.iter().map(|(column, _)| {
        let title = Cell::from(Line::from(column.title).right_aligned());
        if column.order == Some(order) {
            title.underlined()
        } else {
            title
        }
    });
    let header = Row::new(titles.chain([Cell::from("COMMAND")]));
    let rows = runs.iter().map(|run| {
        let number = |of: &Column| Cell::from(Line::from((of.text)(run)).right_aligned());
        let numbers = columns.iter().map(|(column, _)| number(column));
        Row::new(numbers.chain([Cell::from(run.title())]))
    });
    let widths = columns
        .iter()
        .map(|(_, width)| Constraint::Length(*width as u16));
    Table::new(rows, widths.chain([Constraint::Fill(1)]))
        .header(header.style(Style::new().add_modifier(Modifier::BOLD)))
        .row_highlight_style(Style::new().add_modifier(Modifier::REVERSED))
}

/// The columns that fit beside a command, and their widths.
fn fitting(runs: &[Listed], width: usize) -> Vec<(&'static Column, usize)> {
    let width_of = |column: &Column| {
        let texts = runs.iter().map(|run| (column.text)(run).chars().count());
        texts.chain([column.title.len()]).max().unwrap_or(0)
    };
    let mut columns: Vec<_> = (COLUMNS.iter()).map(|of| (of, width_of(of))).collect();
    let room = width.saturating_sub(COMMAND_WIDTH_MIN);
    while columns.iter().map(|(_, width)| width + 1).sum::<usize>() > room && columns.len() > 1 {
        let ranks = columns.iter().enumerate();
        let last = ranks.max_by_key(|(_, (column, _))| column.rank);
        columns.remove(last.map_or(0, |(at, _)| at));
    }
    columns
}

pub(super) fn time(seconds: f64) -> String {
    Nanos((seconds * 1e9) as u64).to_string()
}
