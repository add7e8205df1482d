package telemetry

import "github.com/prometheus/client_golang/prometheus"

// Why a request was refused by its API key.
const (
	KeyMissing = "missing" // no field for keys
	KeyWrong   = "wrong"
	KeyModel   = "model" // the key may not use the model
)

// FileKinds of DPSERVE's files that are read again when they change.
const (
	FileKeys = "api_keys"
	FileTLS  = "tls"
)

// Access counts requests by API key, and says whether the files that decide who may connect can be read.
type Access struct {
	requests, refusals *prometheus.CounterVec
	files              *prometheus.GaugeVec
	expiry             prometheus.Gauge
}

// Access returns the metrics of keys and certificates; call it once.
func (m *Metrics) Access() *Access {
	a := &Access{
		requests: counter("key_requests_total", "Requests with a valid API key, by its name.", labelKey),
		refusals: counter("key_refusals_total",
			"Requests refused by their API key: missing, wrong, or not valid for the model.", labelReason),
		files: gauge("file_reload_failed",
			"1 while a changed file cannot be used and its contents before are in use.", labelFile),
		expiry: prometheus.NewGauge(prometheus.GaugeOpts{
			Namespace: namespace, Name: "tls_certificate_expiry_seconds",
			Help: "Unix time at which the certificate for clients expires; 0 = there is none.",
		}),
	}
	m.registry.MustRegister(a.requests, a.refusals, a.files, a.expiry)
	return a
}

// Used counts a request with a valid key. The name is one of a file with a bounded number of names.
func (a *Access) Used(name string) { a.requests.WithLabelValues(name).Inc() }

// Refused counts a refusal; the reason is one of KeyMissing, KeyWrong and KeyModel.
func (a *Access) Refused(reason string) { a.refusals.WithLabelValues(reason).Inc() }

// Replaced deletes the series of names that a new file no longer has.
func (a *Access) Replaced(before, now []string) {
	keep := map[string]bool{}
	for _, name := range now {
		keep[name] = true
	}
	for _, name := range before {
		if !keep[name] {
			a.requests.DeleteLabelValues(name)
		}
	}
}

// FileFailed says whether a changed file cannot be used; the file is FileKeys or FileTLS.
func (a *Access) FileFailed(file string, failed bool) {
	value := 0.0
	if failed {
		value = 1
	}
	a.files.WithLabelValues(file).Set(value)
}

// CertificateExpires shows when the certificate for clients expires, in Unix seconds.
func (a *Access) CertificateExpires(at int64) { a.expiry.Set(float64(at)) }
