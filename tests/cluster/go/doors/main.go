// Doors into the test cluster: reverse proxies that can be told to answer badly.
//
//	doors CONFIG.json
//
// A door listens on an inherited descriptor, on an address, or on both, and leads to one target: kind "tcp" passes
// bytes on, "https" and "http" look at each request and obey the rules that were set over the control socket.
package main

import (
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"io"
	"log"
	"net"
	"net/http"
	"os"
	"time"
)

// Door is one entry of the configuration.
type Door struct {
	Name   string `json:"name"`
	Kind   string `json:"kind"`   // tcp, https or http
	Fd     int    `json:"fd"`     // an inherited listening socket; 0: none
	Listen string `json:"listen"` // an address of our own network namespace; "": none
	Target string `json:"target"` // host:port
	Says   string `json:"says"`   // in whose words errors are made: kubernetes or registry
}

// Config is the whole configuration.
type Config struct {
	Control string `json:"control"` // path of the control socket
	CA      string `json:"ca"`      // what targets' certificates are signed by
	Cert    string `json:"cert"`    // our own
	Key     string `json:"key"`
	Doors   []Door `json:"doors"`
}

func main() {
	if len(os.Args) != 2 {
		log.Fatal("usage: doors CONFIG.json")
	}
	text, err := os.ReadFile(os.Args[1])
	check(err)
	var config Config
	check(json.Unmarshal(text, &config))
	state := newState()
	failed := make(chan error)
	for _, door := range config.Doors {
		for _, listener := range listeners(door) {
			if door.Kind == "tcp" {
				go func() { failed <- passOn(listener, door.Target) }()
				continue
			}
			if door.Kind == "https" {
				listener = tls.NewListener(listener, ours(config))
			}
			server := &http.Server{Handler: newProxy(door, config, state), ErrorLog: quiet()}
			go func() { failed <- server.Serve(listener) }()
		}
	}
	_ = os.Remove(config.Control)
	control, err := net.Listen("unix", config.Control)
	check(err)
	check(os.Chmod(config.Control, 0o600))
	go func() { failed <- http.Serve(control, state.control()) }()
	check(<-failed)
}

func check(err error) {
	if err != nil {
		log.Fatal(err)
	}
}

// Aborted requests are what this program is for: no line for each.
func quiet() *log.Logger { return log.New(io.Discard, "", 0) }

func listeners(door Door) (all []net.Listener) {
	if door.Fd > 0 {
		file := os.NewFile(uintptr(door.Fd), door.Name)
		listener, err := net.FileListener(file)
		check(err)
		check(file.Close())
		all = append(all, listener)
	}
	if door.Listen != "" {
		listener, err := net.Listen("tcp", door.Listen)
		check(err)
		all = append(all, listener)
	}
	return all
}

// Only HTTP/1.1 is spoken on both sides: a request is a connection, which can be cut.
func ours(config Config) *tls.Config {
	pair, err := tls.LoadX509KeyPair(config.Cert, config.Key)
	check(err)
	return &tls.Config{Certificates: []tls.Certificate{pair}, NextProtos: []string{"http/1.1"}}
}

func theirs(config Config) *tls.Config {
	pool := x509.NewCertPool()
	text, err := os.ReadFile(config.CA)
	check(err)
	if !pool.AppendCertsFromPEM(text) {
		log.Fatal("no certificate in ", config.CA)
	}
	return &tls.Config{RootCAs: pool, NextProtos: []string{"http/1.1"}}
}

func passOn(listener net.Listener, target string) error {
	for {
		here, err := listener.Accept()
		if err != nil {
			return err
		}
		go func() {
			there, err := net.DialTimeout("tcp", target, 5*time.Second)
			if err != nil {
				_ = here.(*net.TCPConn).SetLinger(0) // refused beyond the door: a reset at the door
				_ = here.Close()
				return
			}
			go half(there, here)
			half(here, there)
		}()
	}
}

// half copies one way, then tells the other side that no more will come. The second half to end closes both.
func half(to, from net.Conn) {
	_, err := io.Copy(to, from)
	if err != nil {
		_, _ = to.Close(), from.Close()
		return
	}
	_ = to.(*net.TCPConn).CloseWrite()
}
