//! `pcm-table1`: our traces beside the paper's.

use super::recipes::RECIPES;
use super::study::load;
use crate::experiments::Lab;
use crate::results::{Results, Simulated, Table, TraceFacts};

pub(in crate::experiments) fn run(lab: &Lab, results: &mut Results) -> anyhow::Result<()> {
    let mut found = Simulated::default();
    let loaded = load(lab, &mut found)?;
    let mut rows = Vec::new();
    for (recipe, ours) in RECIPES.iter().zip(&loaded) {
        let paper = &recipe.paper;
        let theirs = TraceFacts {
            instruction_reads: paper.instruction_reads,
            data_reads: paper.data_reads,
            data_writes: paper.data_writes,
            ..TraceFacts::default()
        };
        let row = |name: &str, facts: &TraceFacts, memory: String| {
            vec![
                name.to_owned(),
                memory,
                facts.mix(),
                facts.references().to_string(),
                facts.instruction_reads.to_string(),
                facts.data_reads.to_string(),
                facts.data_writes.to_string(),
            ]
        };
        rows.push(row(
            &format!("{} (paper)", paper.name),
            &theirs,
            paper.memory_kib.to_string(),
        ));
        let memory = format!(
            "{} / {}",
            ours.facts.footprint_4k_bytes >> 10,
            ours.facts.footprint_512_bytes >> 10
        );
        rows.push(row(&ours.facts.name, &ours.facts, memory));
    }
    found.tables.push(Table {
        title: "Memory and references below the cache".to_owned(),
        text: "Ours: memory in pages of 4 KiB / of 512 bytes. The paper does not say which. Chosen by program, input and cache; \
               no count was adjusted."
            .to_owned(),
        columns: [
            "workload",
            "memory KiB",
            "reads : writes",
            "total",
            "instruction reads",
            "data reads",
            "data writes",
        ]
        .map(str::to_owned)
        .to_vec(),
        rows,
    });
    found.tables.push(Table {
        title: "Programs".to_owned(),
        text: "How one differs from its counterpart: no window system, no network, and programs of today behind a cache chosen for \
               the mix. A write-heavy trace needs a cache that does not fetch the line a store misses (`validate`)."
            .to_owned(),
        columns: ["ours", "for", "what it does", "cache"].map(str::to_owned).to_vec(),
        rows: RECIPES
            .iter()
            .map(|recipe| {
                vec![
                    recipe.name.to_owned(),
                    recipe.paper.name.to_owned(),
                    recipe.about.to_owned(),
                    recipe.cache.to_owned(),
                ]
            })
            .collect(),
    });
    if lab.options.small {
        results
            .notes
            .push("Small: the traces are generated, not recorded.".to_owned());
    }
    results.simulated = Some(found);
    Ok(())
}
