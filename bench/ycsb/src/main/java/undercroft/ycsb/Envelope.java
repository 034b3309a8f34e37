package undercroft.ycsb;

import java.nio.charset.StandardCharsets;

/**
 * The JSON document a value is stored in.
 *
 * <p>YCSB's deterministic values are strings of decimal hash codes, which LZ4 cannot shrink. Real records have names,
 * types and defaults around their values. With this envelope redis' memory compresses about 3:1. Without it, compressed
 * memory could not hold all of it in half the DRAM.
 */
final class Envelope {
  private static final String BEFORE_VALUE =
      "\",\"schema\":\"https://example.org/schemas/record-field/2\",\"media_type\":\"text/plain;charset=utf-8\","
          + "\"created\":\"2026-01-01T00:00:00.000Z\",\"owner\":{\"tenant\":\"default\",\"role\":\"service-account\"},"
          + "\"retention\":{\"class\":\"standard\",\"days\":365,\"locked\":false},\"value\":\"";
  private static final String AFTER = "\"}";

  private Envelope() {}

  private static String before(String key, String field) {
    return "{\"id\":\"" + key + "/" + field + BEFORE_VALUE;
  }

  static byte[] close(String key, String field, String value) {
    return (before(key, field) + value + AFTER).getBytes(StandardCharsets.UTF_8);
  }

  /** The value, or null when these are not the bytes of this key and field. */
  static String open(String key, String field, byte[] stored) {
    String text = new String(stored, StandardCharsets.UTF_8);
    String before = before(key, field);
    if (!text.startsWith(before) || !text.endsWith(AFTER) || text.length() < before.length() + AFTER.length()) {
      return null;
    }
    return text.substring(before.length(), text.length() - AFTER.length());
  }
}
