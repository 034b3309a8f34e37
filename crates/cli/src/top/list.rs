//! The runs that `top` shows: their figures of the last minute, their order, which one is selected.

use std::collections::{HashMap, VecDeque};
use std::time::Instant;

use clap::ValueEnum;
use undercroft_proto::report::Snapshot;

/// Figures kept of each run: one for each column of its graph.
pub(super) const HISTORY: usize = 60;

/// Columns by which the runs are sorted, the largest figure first.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub(crate) enum Order {
    /// Faults a second.
    #[default]
    Faults,
    /// Part of the time that threads waited for pages.
    Stall,
    /// DRAM.
    Memory,
    /// Process id, the smallest first.
    Pid,
}

impl Order {
    /// The order that this key chooses.
    pub(super) fn of_key(letter: char) -> Option<Order> {
        Some(match letter {
            'f' => Order::Faults,
            's' => Order::Stall,
            'm' => Order::Memory,
            'p' => Order::Pid,
            _ => return None,
        })
    }
}

/// The rates of a run between two snapshots.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct Rate {
    pub faults: f64,
    pub pages_in: f64,
    pub pages_out: f64,
    /// Part of the time in which some thread waited.
    pub stall: f64,
}

impl Rate {
    /// `None` if no time passed, or the counts are those of another program.
    fn between(before: &Snapshot, after: &Snapshot) -> Option<Rate> {
        let seconds = after.uptime_seconds - before.uptime_seconds;
        if seconds <= 0.0 {
            return None;
        }
        let rate = |before: u64, after: u64| after.saturating_sub(before) as f64 / seconds;
        Some(Rate {
            faults: rate(before.faults.total, after.faults.total),
            pages_in: rate(before.pages.swapped_in, after.pages.swapped_in),
            pages_out: rate(before.pages.swapped_out, after.pages.swapped_out),
            stall: (after.stall_some_seconds - before.stall_some_seconds).max(0.0) / seconds,
        })
    }
}

/// A run.
#[derive(Debug)]
pub(super) struct Listed {
    pub now: Snapshot,
    /// Oldest first; at most [`HISTORY`].
    pub rates: VecDeque<Rate>,
}

impl Listed {
    /// Its name, if it has one, and its command.
    pub(super) fn title(&self) -> String {
        let command = self.now.command_line();
        match &self.now.name {
            Some(name) => format!("{name}: {command}"),
            None => command,
        }
    }

    /// Its newest rates; zero before there are any.
    pub(super) fn rate(&self) -> Rate {
        self.rates.back().copied().unwrap_or_default()
    }

    /// Whether its name, command, class or process id has this text, in small letters.
    fn has(&self, text: &str) -> bool {
        let class = self.now.class.as_deref().unwrap_or_default();
        let all = format!("{}\n{class}\n{}", self.title(), self.now.pid);
        all.to_lowercase().contains(text)
    }
}

/// Meaning of the next key.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Mode {
    /// A command.
    #[default]
    List,
    /// A letter of the filter.
    Filter,
    /// None: any key puts the help away.
    Help,
}

/// All runs.
pub(super) struct List {
    /// All; first those that the filter lets through.
    runs: Vec<Listed>,
    /// How many it lets through.
    shown: usize,
    filter: String,
    pub mode: Mode,
    order: Order,
    reversed: bool,
    /// Process id of the selected run.
    selected: Option<u32>,
    held: bool,
    updated: Option<Instant>,
}

impl List {
    pub(super) fn new(order: Order) -> List {
        List {
            runs: Vec::new(),
            shown: 0,
            filter: String::new(),
            mode: Mode::List,
            order,
            reversed: false,
            selected: None,
            held: false,
            updated: None,
        }
    }

    /// Takes the state of all runs. A run that is not among them has ended.
    pub(super) fn update(&mut self, at: Instant, snapshots: Vec<Snapshot>) {
        if self.held {
            return;
        }
        self.updated = Some(at);
        let known = self.runs.drain(..).map(|run| (run.now.pid, run));
        let mut known: HashMap<u32, Listed> = known.collect();
        for now in snapshots {
            let before = known.remove(&now.pid);
            let mut rates = VecDeque::new();
            if let Some(before) = before {
                rates = before.rates;
                rates.extend(Rate::between(&before.now, &now));
                while rates.len() > HISTORY {
                    rates.pop_front();
                }
            }
            self.runs.push(Listed { now, rates });
        }
        self.sort();
    }

    fn sort(&mut self) {
        let order = self.order;
        let key = |run: &Listed| match order {
            Order::Faults => run.rate().faults,
            Order::Stall => run.rate().stall,
            Order::Memory => run.now.dram_bytes as f64,
            Order::Pid => -f64::from(run.now.pid),
        };
        self.runs.sort_by(|one, other| {
            let larger_first = key(other).total_cmp(&key(one));
            larger_first.then(one.now.pid.cmp(&other.now.pid))
        });
        if self.reversed {
            self.runs.reverse();
        }
        let wanted = self.filter.to_lowercase();
        self.runs.sort_by_key(|run| !run.has(&wanted));
        self.shown = self.runs.partition_point(|run| run.has(&wanted));
        let is_there = |pid| self.runs().iter().any(|run| run.now.pid == pid);
        if !self.selected.is_some_and(is_there) {
            self.selected = self.runs().first().map(|run| run.now.pid);
        }
    }

    /// Shows the runs alone that have this text.
    pub(super) fn set_filter(&mut self, text: String) {
        self.filter = text;
        self.sort();
    }

    pub(super) fn filter(&self) -> &str {
        &self.filter
    }

    pub(super) fn sort_by(&mut self, order: Order) {
        (self.order, self.reversed) = (order, false);
        self.sort();
    }

    pub(super) fn reverse(&mut self) {
        self.reversed = !self.reversed;
        self.sort();
    }

    /// Stops or goes on with taking news.
    pub(super) fn hold(&mut self) {
        self.held = !self.held;
    }

    /// Selects the run this many places further down.
    pub(super) fn select(&mut self, by: isize) {
        let at = self.selected_at().unwrap_or(0).saturating_add_signed(by);
        let at = at.min(self.shown.saturating_sub(1));
        self.selected = self.runs().get(at).map(|run| run.now.pid);
    }

    /// The runs that the filter lets through, in their order.
    pub(super) fn runs(&self) -> &[Listed] {
        &self.runs[..self.shown]
    }

    /// The place of the selected run.
    pub(super) fn selected_at(&self) -> Option<usize> {
        let is_it = |run: &Listed| Some(run.now.pid) == self.selected;
        self.runs().iter().position(is_it)
    }

    pub(super) fn order(&self) -> Order {
        self.order
    }

    pub(super) fn is_held(&self) -> bool {
        self.held
    }

    /// Whether there was any news.
    pub(super) fn is_known(&self) -> bool {
        self.updated.is_some()
    }
}
