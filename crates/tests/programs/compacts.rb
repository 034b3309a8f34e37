# Keeps texts and tables while the collector moves them, and prints digests of all.
require "digest"
GC.auto_compact = true
texts = Array.new(60_000) { |n| "text #{n} " * (1 + n % 24) }
table = {}
texts.each_with_index { |text, n| table["key #{n}"] = [text, n.to_s] if n % 3 == 0 }
4.times do |round|
  texts.each_index { |n| texts[n] = "#{round}/#{n}," * (1 + n % 11) if n % 5 == round }
  GC.compact
  texts.each_with_index { |text, n| abort "text #{n} is wrong" unless text.include?(n.to_s) }
end
reader, writer = IO.pipe
other = Thread.new { Digest::SHA256.hexdigest(reader.read) }
texts.each { |text| writer.write(text) }
writer.close
puts other.value
all = Digest::SHA256.new
table.each { |key, (text, number)| all << key << text << number }
puts table.size, all.hexdigest
child = fork { GC.compact; exit!(texts[7].include?("7") ? 0 : 1) }
Process.wait(child)
puts $?.exitstatus
