//! `pcm-table1`: our traces beside the paper's.

use super::load::{Loaded, load, walkers};
use super::recipes::{RECIPES, Recipe};
use super::walkers::WALKERS;
use crate::experiments::Lab;
use crate::results::{Results, Simulated, Table, TraceFacts};

pub(in crate::experiments) fn run(lab: &Lab, results: &mut Results) -> anyhow::Result<()> {
    let mut found = Simulated::default();
    let loaded = load(lab, &mut found)?;
    let walkers = walkers(lab, &mut found)?;
    found.tables = vec![
        facts(
            "Memory and references below the cache",
            "Ours: memory in pages of 4 KiB / of 512 bytes. The paper does not say which. The programs were \
             chosen among some twenty recorded ones, for what they do, their mix and their footprint, and not \
             blind to what they save: `bench/pcm-traces/README.md` names those passed over. The numbers of lines \
             drawn, words misspelled and rows updated set the mix; no count was adjusted afterwards.",
            &RECIPES,
            &loaded,
        ),
        programs(
            "Programs",
            "They differ from the paper's programs: no window system, no network, programs of today, and kinds of \
             work that only resemble the paper's. All are behind one cache, which does not fetch the line that a \
             store misses (`validate`): behind a cache that fetches, no trace writes more than it reads.",
            &RECIPES,
        ),
        facts(
            "For comparison: programs that walk through their memory in order",
            "The first set, chosen by mix and size alone. Figures 3, 4 and 5 show it beside the four above.",
            &WALKERS,
            &walkers,
        ),
        programs(
            "... and what they are",
            "Each behind a cache chosen for its mix.",
            &WALKERS,
        ),
    ];
    if lab.options.small {
        results
            .notes
            .push("Small: the traces are generated, not recorded.".to_owned());
    }
    results.simulated = Some(found);
    Ok(())
}

fn facts(title: &str, text: &str, recipes: &[Recipe], loaded: &[Loaded]) -> Table {
    let row = |name: String, facts: &TraceFacts, memory: String| {
        vec![
            name,
            memory,
            facts.mix(),
            facts.references().to_string(),
            facts.instruction_reads.to_string(),
            facts.data_reads.to_string(),
            facts.data_writes.to_string(),
        ]
    };
    let mut rows = Vec::new();
    for (recipe, ours) in recipes.iter().zip(loaded) {
        let paper = &recipe.paper;
        let theirs = TraceFacts {
            instruction_reads: paper.instruction_reads,
            data_reads: paper.data_reads,
            data_writes: paper.data_writes,
            ..TraceFacts::default()
        };
        rows.push(row(
            format!("{} (paper)", paper.name),
            &theirs,
            paper.memory_kib.to_string(),
        ));
        let memory = format!(
            "{} / {}",
            ours.facts.footprint_4k_bytes >> 10,
            ours.facts.footprint_512_bytes >> 10
        );
        rows.push(row(ours.facts.name.clone(), &ours.facts, memory));
    }
    Table::new(
        title,
        text,
        "workload | memory KiB | reads : writes | total | instruction reads | data \
             reads | data writes",
        rows,
    )
}

fn programs(title: &str, text: &str, recipes: &[Recipe]) -> Table {
    let rows = recipes.iter().map(|recipe| {
        vec![
            recipe.name.to_owned(),
            recipe.paper.name.to_owned(),
            recipe.about.to_owned(),
            recipe.cache.to_owned(),
        ]
    });
    Table::new(title, text, "ours | for | what it does | cache", rows)
}
