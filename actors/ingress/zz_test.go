package ingress
import ("testing")
func BenchmarkFarOnly(b *testing.B) {
	whole := benchEngine(b, 0, 0)
	at := benchIngressAt(b, whole, "n2")
	b.ReportAllocs()
	b.ResetTimer()
	load(b, at, chatBody, b.N, 8)
}
func BenchmarkNearOnly(b *testing.B) {
	whole := benchEngine(b, 0, 0)
	at := benchIngressAt(b, whole, "n1")
	b.ReportAllocs()
	b.ResetTimer()
	load(b, at, chatBody, b.N, 8)
}
