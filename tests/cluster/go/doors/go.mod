module rlsandbox.test/doors

go 1.26.0
