// Allocates, drops and sums up arrays and strings, so that a collector moves memory; prints
// checksums.
import java.util.*;
public class Churn {
    static long mix(long x) { x += 0x9e3779b97f4a7c15L; x = (x ^ (x >>> 30)) * 0xbf58476d1ce4e5b9L; x = (x ^ (x >>> 27)) * 0x94d049bb133111ebL; return x ^ (x >>> 31); }
    public static void main(String[] args) {
        long[][] held = new long[2000][];
        HashMap<Long, String> map = new HashMap<>();
        long sum = 0;
        for (long i = 0; i < Long.parseLong(args[0]); i++) {
            long[] block = new long[1000 + (int) (Math.floorMod(mix(i), 5000L))];
            for (int k = 0; k < block.length; k++) block[k] = mix(i * 31 + k);
            int slot = (int) Math.floorMod(mix(i ^ 77), (long) held.length);
            if (held[slot] != null) for (long v : held[slot]) sum = sum * 31 + v;
            held[slot] = block;
            map.put(mix(i) % 50000, Long.toHexString(mix(i)));
            if (i % 10000 == 9999) System.gc();
        }
        long text = 0;
        for (long key = -50000; key < 50000; key++) { String s = map.get(key); if (s != null) text = text * 31 + s.hashCode(); }
        System.out.println("arrays " + Long.toHexString(sum) + " strings " + Long.toHexString(text) + " entries " + map.size());
    }
}
