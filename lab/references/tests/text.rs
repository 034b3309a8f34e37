//! Text that is imported, by the function that the fuzz target runs.

use undercroft_references::fuzz;

/// Mutated text through the function that the fuzz target runs; fixed seeds.
#[test]
fn fuzz_entry_holds_on_mutated_text() {
    let texts = [
        "time,pid,address,size,kind\n1,2,0x1000,8,R\n2,2,4096,4,W\n3,2,8191,2,M\n",
        "==1== lackey\nI  04001000,3\n L 1ffefff7e8,8\n S 1ffefff7e0,8\n M 04222cac,4\n",
    ];
    let mut random = undercroft_seeded::Random::new(3);
    let mut read = 0;
    for round in 0..40_000 {
        let mut bad = texts[round % 2].as_bytes().to_vec();
        for _ in 0..random.scaled(4) {
            let at = random.scaled(bad.len() as u64) as usize;
            match random.scaled(4) {
                0 => bad[at] = random.scaled(256) as u8,
                1 => bad.truncate(at.max(1)),
                2 => bad.insert(at, b"0x9,\n RWM-"[random.scaled(10) as usize]),
                _ => bad[at..].rotate_left(1),
            }
        }
        read += fuzz::imports(&bad);
    }
    assert!(read > 20_000, "{read} prove nothing");
}
