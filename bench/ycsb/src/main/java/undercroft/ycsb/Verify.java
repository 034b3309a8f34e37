package undercroft.ycsb;

import java.util.Map;
import redis.clients.jedis.Jedis;
import site.ycsb.Utils;

/**
 * Reads every record that the load phase wrote and compares every byte with what YCSB's deterministic generator makes.
 *
 * <p>Arguments: port, record count, field count, field length. Prints one JSON line. Exit status 3 on a difference.
 */
final class Verify {
  private Verify() {}

  static int run(int port, long records, int fields, int length) {
    long missing = 0;
    long wrong = 0;
    long values = 0;
    try (Jedis jedis = new Jedis("127.0.0.1", port, 60_000)) {
      for (long number = 0; number < records; number++) {
        String key = "user" + Utils.hash(number); // CoreWorkload.buildKeyName with hashed insert order
        Map<byte[], byte[]> all = jedis.hgetAll(RedisClient.bytes(key));
        if (all.size() != fields) {
          missing++;
          continue;
        }
        for (Map.Entry<byte[], byte[]> entry : all.entrySet()) {
          String field = new String(entry.getKey(), java.nio.charset.StandardCharsets.UTF_8);
          values++;
          if (!expected(key, field, length).equals(Envelope.open(key, field, entry.getValue()))) {
            wrong++;
            System.err.println("WRONG BYTES: " + key + " " + field);
          }
        }
      }
    }
    System.out.println("{\"records\":" + records + ",\"values\":" + values + ",\"missing\":" + missing + ",\"wrong\":" + wrong + "}");
    return missing == 0 && wrong == 0 ? 0 : 3;
  }

  /** YCSB's CoreWorkload.buildDeterministicValue (private there), for constant lengths. */
  private static String expected(String key, String field, int length) {
    StringBuilder text = new StringBuilder(length + 16);
    text.append(key).append(':').append(field);
    while (text.length() < length) {
      text.append(':').append(text.toString().hashCode());
    }
    text.setLength(length);
    return text.toString();
  }
}
